"""Whether Triton works on a device: one small kernel, compiled and launched.

Triton needs a C compiler, a folder for its cache and a device that its assembler knows. Which of these is missing shows
in the first launch alone.
"""

# mypy: ignore-errors
# The body is Triton's language, which is not typed as Python is.
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from lightning_videoscale.kernels.capture import is_capturing, not_while_capturing


@triton.jit
def _one_kernel(X):
    tl.store(X, 1.0)


@functools.cache
def failure(device: int) -> str | None:
    """Returns why no kernel can be compiled or launched on a device, or None if one was.

    Raises:
        RuntimeError: If a CUDA graph is being captured.
    """
    if is_capturing():
        raise not_while_capturing("Triton")
    try:
        with torch.cuda.device(device):
            _one_kernel[(1,)](torch.empty(1, device="cuda"))
    except Exception as error:  # whatever it is, this device's kernels would end in it
        text = str(error).strip().partition("\n")[0]
        return f"a first kernel failed ({type(error).__name__}: {text})"
    return None
