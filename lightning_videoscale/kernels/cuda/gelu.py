"""`gelu` on CUDA: source, see ``csrc/gelu.cuh``; interface, see `GeluBackend`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda.launch import address_of, load, rows_at
from lightning_videoscale.kernels.cuda.row_variant import TYPES
from lightning_videoscale.kernels.gelu import GeluVariant

# Layouts of the kernels' arguments. Rows are an address and a stride in bytes.
_ROWS = "Pq"
_FORWARD_LAYOUT, _BACKWARD_LAYOUT, _FINALIZE_LAYOUT = f"{_ROWS}Pii", f"{_ROWS * 2}PPPii", "PPii"
_ROWS_AT_ONCE = 4  # of a thread, see the source
_FINALIZE_COLUMNS, _FINALIZE_BLOCK = 32, (8, 32, 1)
# Threads of a multiprocessor: backward keeps twice the loads and the sums in its registers.
_FORWARD_THREADS, _BACKWARD_THREADS = 1024, 768


class GeluKernels:
    """The kernels for rows of one width and dtype, compiled, and how they are launched. Make it once for each."""

    def __init__(self, columns: int, dtype: torch.dtype, device: int) -> None:
        macros = constants(columns, dtype)
        threads = threads_for(columns, dtype)
        self.forward = load("gelu.cuh", "gelu_forward", _FORWARD_LAYOUT, macros, device)
        self.backward = load("gelu.cuh", "gelu_backward", _BACKWARD_LAYOUT, macros, device)
        self.finalize = load("gelu.cuh", "gelu_finalize", _FINALIZE_LAYOUT, macros, device, early=True)
        self.block = (threads, 1, 1)
        self._tiles = -(-columns * dtype.itemsize // (16 * threads))
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def grid(self, n: int, *, backward: bool) -> tuple[int, int, int]:
        """Column tiles, and shares of n rows: as many as are resident at once."""
        if n >= 2**31:
            raise NotImplementedError(f"At most 2³¹ - 1 rows; got {n}.")
        of_multiprocessor = (_BACKWARD_THREADS if backward else _FORWARD_THREADS) // self.block[0]
        shares = max(1, of_multiprocessor * self._multiprocessors // self._tiles)
        return self._tiles, min(shares, -(-n // _ROWS_AT_ONCE)), 1


def threads_for(columns: int, dtype: torch.dtype) -> int:
    """Threads of a block, each with 16 bytes of a row: the fewest idle ones in a row, then the fewest blocks."""
    vectors = columns * dtype.itemsize // 16
    return min(range(256, 0, -32), key=lambda threads: (-(-vectors // threads) * threads, -threads))


def constants(columns: int, dtype: torch.dtype) -> dict[str, str | int]:
    """Returns the macros of ``csrc/gelu.cuh``."""
    threads = threads_for(columns, dtype)
    return {
        "ACTIVATION": TYPES[dtype],
        "BLOCK_THREADS": threads,
        "FORWARD_BLOCKS": _FORWARD_THREADS // threads,
        "BACKWARD_BLOCKS": _BACKWARD_THREADS // threads,
    }


def limit(variant: GeluVariant, device: int) -> str | None:
    """See `GeluBackend.limit`."""
    if variant.dtype not in TYPES:
        return f"x must be of {[*TYPES]}; got {variant.dtype}"
    return f"F must be a multiple of 8; got {variant.columns}" if variant.columns % 8 else None


_kernels = functools.cache(GeluKernels)


def forward(x: Tensor) -> Tensor:
    """See `GeluBackend.forward`."""
    (n, f), y = x.shape, x.new_empty(x.shape)
    kernels = _kernels(f, x.dtype, x.get_device())
    kernels.forward(kernels.grid(n, backward=False), kernels.block, *rows_at(x), y.data_ptr(), n, f)
    return y


def backward(dy: Tensor, x: Tensor, *, sums: bool, again: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `GeluBackend.backward`."""
    (n, f), dx = x.shape, x.new_empty(x.shape)
    kernels = _kernels(f, x.dtype, x.get_device())
    grid = kernels.grid(n, backward=True)
    y = x.new_empty(x.shape) if again else None
    parts = x.new_empty((grid[1], f), dtype=torch.float32) if sums else None
    kernels.backward(
        grid, kernels.block, *rows_at(dy), *rows_at(x), dx.data_ptr(), address_of(y), address_of(parts), n, f
    )
    if parts is None:
        return dx, None, y
    total = x.new_empty(f, dtype=torch.float32)
    columns = -(-f // _FINALIZE_COLUMNS)
    kernels.finalize((columns, 1, 1), _FINALIZE_BLOCK, parts.data_ptr(), total.data_ptr(), grid[1], f)
    return dx, total, y
