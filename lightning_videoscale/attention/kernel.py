"""What every kernel of attention offers, of whatever package: `AttentionKernel`.

All return the log-sum-exp in natural logarithms. So the backward of any is right for what any other has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.compat.names import installed_version
from lightning_videoscale.compat.torch.attention import Gradients

Forward = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None], Gradients]

HALF = (torch.bfloat16, torch.float16)


class AttentionKernel(NamedTuple):
    """A kernel, forward and backward apart; tensors are (B, H, S, D), log-sum-exps (B, H, S) in float32.

    Attributes:
        name: As ``attention_backend=`` takes it.
        package: The distribution that brings it, whose version counts.
        forward: Takes query, key, value, the scale and an additive bias (B, 1, 1, K) or None; returns output and
            log-sum-exp.
        backward: Takes the output's gradient, query, key, value, and output and log-sum-exp over *all* keys, scale and
            bias; returns the gradients of query, key and value.
        unusable: Why it cannot run on a device at all, such as that it is not installed; None if it can.
        limit: Why it cannot run a call on a device where it is usable; None if it can.
    """

    name: str
    package: str
    forward: Forward
    backward: Backward
    unusable: Callable[[torch.device], str | None]
    limit: Callable[[AttentionCase], str | None]

    def objection(self, case: AttentionCase) -> str | None:
        """Returns why it cannot run a call, or None if it can."""
        return self.unusable(case.device) or self.limit(case)

    @property
    def version(self) -> str | None:
        """The installed version of its package, None without one."""
        return installed_version(self.package)


def needs_capability(device: torch.device, least: tuple[int, int], most: int | None = None) -> str | None:
    """Returns why a device is no GPU of compute capability ``least`` up to major version ``most``, or None if it is."""
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs, and this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < least or (most is not None and major > most):
        wanted = ".".join(map(str, least)) + (f" to {most}.x" if most is not None else " or newer")
        return f"it needs compute capability {wanted}, and this GPU has {major}.{minor}"
    return None


def needs_half(case: AttentionCase) -> str | None:
    """Returns which of the limits that most kernels share a call is beyond; None if of none.

    These are half precision, no mask, and a head dim that is a multiple of 8 up to 256.
    """
    if case.dtype not in HALF:
        return f"it computes bfloat16 and float16, and this is {str(case.dtype).removeprefix('torch.')}"
    if case.head_dim % 8 or case.head_dim > 256:
        return f"it needs a head dim that is a multiple of 8 up to 256, and this is {case.head_dim}"
    return "it takes no key mask" if case.masked else None
