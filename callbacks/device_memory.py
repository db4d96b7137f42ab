"""What a CUDA device's allocator holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lightning_videoscale.topology import RunsByGraphs


class DeviceMemory(NamedTuple):
    """The memory of one process on its device, in bytes.

    Attributes:
        allocated: In tensors now.
        reserved: Held by the allocator now, in tensors or free for them.
        peak: Most that was allocated since the last reset, with what CUDA graphs keep.
        fragmented: Reserved but not allocated, in blocks whose neighbours are in use: it cannot be given back to the
            device, and serves no tensor larger than such a block.
        capacity: Most that this process could reserve.
        graphs: Kept for CUDA graphs: a part of what is reserved that is in no tensor between two replays.
    """

    allocated: float
    reserved: float
    peak: float
    fragmented: float
    capacity: float
    graphs: float = 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is fragmented, in [0, 1]."""
        return self.fragmented / self.reserved if self.reserved else 0.0


def device_memory(stats: Mapping[str, Any], free_bytes: float, graphs: float = 0.0) -> DeviceMemory:
    """Reads the allocator's statistics.

    Args:
        stats: As `torch.cuda.memory_stats` returns them.
        free_bytes: What the device has left for anyone. Other processes' memory is thus no part of the capacity.
        graphs: Bytes that CUDA graphs keep.
    """
    reserved = stats["reserved_bytes.all.current"]
    return DeviceMemory(
        allocated=stats["allocated_bytes.all.current"],
        reserved=reserved,
        peak=stats["allocated_bytes.all.peak"] + graphs,
        fragmented=stats["inactive_split_bytes.all.current"],
        capacity=reserved + free_bytes,
        graphs=graphs,
    )


class MemoryGauge:
    """Reads one CUDA device's memory; neither reading nor resetting makes the device wait.

    Args:
        device: The device.
        graphs: Returns how many bytes CUDA graphs keep.
    """

    def __init__(self, device: torch.device, graphs: Callable[[], float] = lambda: 0.0) -> None:
        self._device, self._graphs = device, graphs

    @classmethod
    def of(cls, trainer: pl.Trainer) -> MemoryGauge | None:
        """Returns what reads the memory of a Trainer's device, or None where nothing can."""
        strategy = trainer.strategy
        if strategy.root_device.type != "cuda":
            return None
        if not isinstance(strategy, RunsByGraphs):
            return cls(strategy.root_device)
        return cls(strategy.root_device, lambda: strategy.describe_graphs().get("bytes", 0))

    def read(self) -> DeviceMemory:
        """Returns the memory now, with the peak since the last `reset_peak`."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return device_memory(torch.cuda.memory_stats(self._device), free_bytes, self._graphs())

    def peak(self) -> float:
        """Returns the most bytes that were allocated since the last `reset_peak`, with what CUDA graphs keep."""
        return float(torch.cuda.max_memory_allocated(self._device) + self._graphs())

    def reset_peak(self) -> None:
        """Lets the peak start again from what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)
