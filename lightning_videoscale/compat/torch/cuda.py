"""Streams and assertions on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_videoscale.compat.torch import TORCH

current_raw_stream: Callable[[int], int] = TORCH.function("torch._C", "_cuda_getCurrentRawStream")
"""Returns the handle of the current stream of a device, which is given by its number.

``torch.cuda.current_stream().cuda_stream`` is public and several times slower, and every launch needs it.
"""


def assert_on_device(condition: Tensor) -> None:
    """Fails the device, when its stream comes to it, if the one element is zero; every later use of it then raises.

    There is no public assertion of a tensor that the host does not wait for.
    """
    TORCH.get(torch, "_assert_async")(condition)
