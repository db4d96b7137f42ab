"""Streams, copies and assertions on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_videoscale.compat.torch import TORCH

current_raw_stream: Callable[[int], int] = TORCH.function("torch._C", "_cuda_getCurrentRawStream")
"""Returns the handle of the current stream of a device, which is given by its number.

``torch.cuda.current_stream().cuda_stream`` is public and several times slower, and every launch needs it.
"""


def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors to tensors of the same sizes, on a GPU in one kernel.

    ``Tensor.copy_`` takes a launch for each, and may be done by the copy engine, which is slow within one device.
    """
    TORCH.get(torch, "_foreach_copy_")(list(targets), list(sources))


def assert_on_device(condition: Tensor) -> None:
    """Fails the device, when its stream comes to it, if the one element is zero; every later use of it then raises.

    There is no public assertion of a tensor that the host does not wait for.
    """
    TORCH.get(torch, "_assert_async")(condition)
