"""Real DeepSpeed on CPUs, for tests."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models import lifted_float_casts

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (`make install` installs it)"
)


def skip_without_float16() -> None:
    """Skips the test that calls it where DeepSpeed does not train in float16, as on many CPUs."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if not CPU_Accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed trains in float16 only on CPUs that multiply it, as those with AVX512-FP16 do")


@contextmanager
def deepspeed_on_cpu() -> Iterator[None]:
    """Lets a process use DeepSpeed, and leaves it as it was for tests without."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its reductions over shared memory are for inference; compiling them would take a minute where it is done first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with patch.object(F, "linear", F.linear):  # stage 3 replaces it for good
        yield


@contextmanager
def float64_inside() -> Iterator[None]:
    """Layers compute in their input's float64 on parameters of float32, the only ones that ZeRO takes.

    The rounding that remains is that of the parameters and gradients, which ZeRO keeps in float32.
    """

    def wide(a: Any) -> Any:
        return a.double() if isinstance(a, Tensor) else a

    def widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return function(*map(wide, args), **{name: wide(a) for name, a in kwargs.items()})

        return call

    names = ("linear", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm")
    with (
        lifted_float_casts(),
        patch.multiple(F, **{name: widened(getattr(F, name)) for name in names}),
        patch.object(Tensor, "__matmul__", widened(Tensor.__matmul__)),
        patch.object(torch, "matmul", widened(torch.matmul)),
        patch.object(torch, "einsum", widened(torch.einsum)),
    ):
        yield
