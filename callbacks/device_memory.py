"""What a CUDA device's allocator holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """The memory of one process on its device, in bytes.

    Attributes:
        allocated: In tensors now.
        reserved: Held by the allocator now, in tensors or free for them.
        peak: Most that was allocated since the last reset.
        fragmented: Reserved but not allocated, in blocks whose neighbours are in use: it cannot be given back to the
            device, and serves no tensor larger than such a block.
        capacity: Most that this process could reserve.
    """

    allocated: float
    reserved: float
    peak: float
    fragmented: float
    capacity: float

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is fragmented, in [0, 1]."""
        return self.fragmented / self.reserved if self.reserved else 0.0


def device_memory(stats: Mapping[str, Any], free_bytes: float) -> DeviceMemory:
    """Reads the allocator's statistics.

    Args:
        stats: As `torch.cuda.memory_stats` returns them.
        free_bytes: What the device has left for anyone. Other processes' memory is thus no part of the capacity.
    """
    reserved = stats["reserved_bytes.all.current"]
    return DeviceMemory(
        allocated=stats["allocated_bytes.all.current"],
        reserved=reserved,
        peak=stats["allocated_bytes.all.peak"],
        fragmented=stats["inactive_split_bytes.all.current"],
        capacity=reserved + free_bytes,
    )


class MemoryGauge:
    """Reads one CUDA device's memory; neither reading nor resetting makes the device wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> DeviceMemory:
        """Returns the memory now, with the peak since the last `reset_peak`."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return device_memory(torch.cuda.memory_stats(self._device), free_bytes)

    def peak(self) -> float:
        """Returns the most bytes that were allocated since the last `reset_peak`."""
        return float(torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        """Lets the peak start again from what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)
