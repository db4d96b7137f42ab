"""Streams and assertions on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.compat.torch import TORCH


def current_raw_stream(device: int) -> int:
    """Returns the handle of the current stream of a device.

    ``torch.cuda.current_stream().cuda_stream`` is public and several times slower, and every launch needs it.
    """
    try:
        handle: int = torch._C._cuda_getCurrentRawStream(device)
    except AttributeError as error:
        raise TORCH.missing("torch._C", "_cuda_getCurrentRawStream") from error
    return handle


def assert_on_device(condition: Tensor) -> None:
    """Fails the device, when its stream comes to it, if the one element is zero; every later use of it then raises.

    There is no public assertion of a tensor that the host does not wait for.
    """
    TORCH.get(torch, "_assert_async")(condition)
