"""How large the Triton kernels are: tiles, warps, programs. Measure again when a GPU of another kind matters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightning_videoscale.kernels.capture import is_capturing, not_while_capturing

_SUMS_BYTES = 8 << 10  # of shared memory, for the sums over a row
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
    """Returns the launch over the rows of x (N, D), N > 0, that loads D elements of each of these tensors per row."""
    rows, channels = x.shape
    tiles, block = _tiling(channels)
    # 16 bytes of bf16 per thread and tile; backward holds twice as many rows in registers.
    warps = max(1, block // 256) * (2 if backward and tiles > 2 else 1)
    most = _programs(x.device, warps)
    # Rows under way lie in shared memory, but for the one that is computed with.
    bytes_per_row = tiles * block * sum(t.element_size() for t in tensors if t is not None)
    stages = max(1, min(3, 1 + (shared_bytes(x.device) - _SUMS_BYTES) // bytes_per_row))
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
def shared_bytes(device: torch.device) -> int:
    """The most that a program may have on a device; 64 KiB where that does not say."""
    if device.type != "cuda":
        return 1 << 30
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 16)


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel on the current device.

    Raises:
        RuntimeError: If it has not run there yet and a CUDA graph is being captured.
    """
    if is_capturing():
        compiled = kernel.warmup(*arguments, grid=grid, **constants)  # from the cache, or by the host alone
        if compiled.module is None:
            raise not_while_capturing(f"The Triton kernel {kernel.__name__}")
    kernel[grid](*arguments, **constants)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
