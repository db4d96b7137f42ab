"""How large the Triton kernels are: tiles, warps, programs. Measure again when a GPU of another kind matters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

_INTERPRETED_PROGRAMS = 5  # so that groups and programs meet in every way at small sizes


class Launch(NamedTuple):
    """Constants of a launch over rows.

    Attributes:
        programs: The grid.
        rows_per_program: Rows that each walks, the last perhaps fewer.
        tiles: K.
        block: Channels per tile.
        warps: Warps per program.
        stages: How many rows are under way at once.
    """

    programs: int
    rows_per_program: int
    tiles: int
    block: int
    warps: int
    stages: int


def launch_for(x: Tensor, tensors: Sequence[Tensor | None], *, backward: bool) -> Launch:
    """Returns the launch over the rows of x (N, D), N > 0, that reads these tensors of its shape row by row."""
    rows, channels = x.shape
    tiles, block = _tiling(channels)
    # 16 bytes of bf16 per thread and tile; backward holds twice as many rows in registers.
    warps = max(1, block // 256) * (2 if backward and tiles > 2 else 1)
    most = _programs(x.device, warps)
    # Rows under way lie in shared memory, but for the one that is computed with.
    bytes_per_row = tiles * block * sum(t.element_size() for t in tensors if t is not None)
    stages = max(1, min(3, 1 + _shared_bytes(x.device) // bytes_per_row))
    rows_per_program = triton.cdiv(rows, min(rows, most))
    return Launch(triton.cdiv(rows, rows_per_program), rows_per_program, tiles, block, warps, stages)


@functools.cache
def _tiling(channels: int) -> tuple[int, int]:
    """The fewest tiles of a power of two of channels that leave at most an eighth of the lanes idle."""
    for block in (1024, 512, 256):
        tiles = triton.cdiv(channels, block)
        if 8 * (tiles * block - channels) <= channels:
            return tiles, block
    block = min(128, triton.next_power_of_2(channels))
    return triton.cdiv(channels, block), block


@functools.cache
def _programs(device: torch.device, warps: int) -> int:
    """Enough programs to fill the device: 16 warps on each multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 16 // warps)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Of one program, less what its sums over a row take; 64 KiB where the device does not say."""
    if device.type != "cuda":
        return 1 << 30
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 16) - (8 << 10)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
