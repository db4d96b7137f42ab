"""`gelu` in Triton: the launches of `gelu_kernels`; interface, see `GeluBackend`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lightning_videoscale.kernels.gelu import GeluVariant
from lightning_videoscale.kernels.triton.finalize import finalize_kernel
from lightning_videoscale.kernels.triton.gelu_kernels import backward_kernel, forward_kernel
from lightning_videoscale.kernels.triton.launch import on_device_of, run_kernel

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROWS, _WIDEST, _WARPS = 4, 512, 4  # a tile: two vectors of 16 bytes per thread and tensor in half precision
_PROGRAMS_OF_MULTIPROCESSOR, _INTERPRETED_PROGRAMS = 6, 5
_FINALIZE_COLUMNS, _FINALIZE_LINES = 64, 32


def limit(variant: GeluVariant, device: int) -> str | None:
    """See `GeluBackend.limit`."""
    if variant.dtype not in _DTYPES:
        return f"it computes in float32 and takes {[*_DTYPES]}; got {variant.dtype}"
    return None


def forward(x: Tensor) -> Tensor:
    """See `GeluBackend.forward`."""
    (n, f), y = x.shape, x.new_empty(x.shape)
    columns, shares = _launch(x)
    with on_device_of(x):
        run_kernel(
            forward_kernel, (triton.cdiv(f, columns), shares),
            x, y, x.stride(0), n, shares, F=f, ROWS=_ROWS, COLUMNS=columns, num_warps=_WARPS,
        )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, *, sums: bool, again: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `GeluBackend.backward`."""
    (n, f), dx = x.shape, x.new_empty(x.shape)
    y = x.new_empty(x.shape) if again else None
    columns, shares = _launch(x)
    partials = x.new_empty(shares, f, dtype=torch.float32) if sums else None
    with on_device_of(x):
        run_kernel(
            backward_kernel, (triton.cdiv(f, columns), shares),
            dy, x, dx, y, partials, dy.stride(0), x.stride(0), n, shares,
            F=f, ROWS=_ROWS, COLUMNS=columns, num_warps=_WARPS,
        )  # fmt: skip
        if partials is None:
            return dx, None, y
        total = x.new_empty(f, dtype=torch.float32)
        run_kernel(
            finalize_kernel, (1, triton.cdiv(f, _FINALIZE_COLUMNS), 1),
            partials, total, *[None] * 5, None, shares, _ROWS, n, shares,
            D=f, COLUMNS=_FINALIZE_COLUMNS, LINES=_FINALIZE_LINES, ALL_ROWS=True,
        )  # fmt: skip
    return dx, total, y


def _launch(x: Tensor) -> tuple[int, int]:
    """Columns of a tile, and how many programs share the rows of each column of tiles."""
    n, f = x.shape
    columns: int = min(_WIDEST, triton.next_power_of_2(f))
    most = _INTERPRETED_PROGRAMS
    if x.is_cuda:
        most = _PROGRAMS_OF_MULTIPROCESSOR * torch.cuda.get_device_properties(x.device).multi_processor_count
    return columns, min(triton.cdiv(n, _ROWS), max(1, most // triton.cdiv(f, columns)))
