"""The memory of CUDA graphs.

`alias`           a tensor over memory that somebody else owns, for what a graph writes
`end_allocation`  ends a capture in the eyes of the allocator
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.torch import TORCH


class _Memory:
    """A piece of a device's memory, as torch takes it from other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def alias(x: Tensor) -> Tensor:
    """Returns a tensor over the memory of a strided ``x`` on a GPU that does not keep it from being reused."""
    if x.numel() == 0:
        return torch.empty_like(x, requires_grad=False)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.as_tensor(_Memory(x.data_ptr(), elements * x.element_size()), device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())


def end_allocation(device: torch.device, pool: Any) -> None:
    """Takes no more memory from a pool of graphs, after a capture that was broken before it could end.

    Else the allocator takes the capture for under way, and gives no memory back to the device any more.
    """
    end = TORCH.get("torch._C", "_cuda_endAllocateToPool")
    with suppress(RuntimeError):  # it has ended
        end(device.index, pool)
