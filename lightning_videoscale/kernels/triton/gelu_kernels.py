"""The kernels of `gelu`, a tile of rows and columns at a time."""

# mypy: ignore-errors
# The bodies are Triton's language, which is not typed as Python is.
from __future__ import annotations

import triton
import triton.language as tl

# gelu(x) = x · σ(w) with w = 2 √(2/π) (x + 0.044715 x³), since 1 + tanh(u) = 2 σ(2u).
_LINEAR = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.07135481627260025)


@triton.jit
def forward_kernel(X, Y, x_stride, rows, shares, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (tile, share) computes every ``shares``-th ROWS rows of COLUMNS columns of y."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(tl.program_id(1) * ROWS, rows, shares * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (columns < F)[None, :]
        x = tl.load(X + row * x_stride + columns[None, :], inside, 0.0).to(tl.float32)
        y = x / (1 + tl.exp(-x * (_LINEAR + _CUBIC * (x * x))))
        tl.store(Y + row * F + columns[None, :], y.to(Y.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
    DY, X, DX, Y, PARTIALS, dy_stride, x_stride, rows, shares,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Likewise of dx, and of y where it is wanted; PARTIALS, where there are any, are the sums of each share's rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, shares * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (columns < F)[None, :]
        x = tl.load(X + row * x_stride + columns[None, :], inside, 0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + columns[None, :], inside, 0.0).to(tl.float32)
        square = x * x
        denominator = 1 + tl.exp(-x * (_LINEAR + _CUBIC * square))
        sigmoid = 1 / denominator
        slope = x * (_LINEAR + 3 * _CUBIC * square)  # x · dw/dx
        dx = dy * (sigmoid + sigmoid * (1 - sigmoid) * slope)
        tl.store(DX + row * F + columns[None, :], dx.to(DX.dtype.element_ty), inside)
        if Y is not None:
            tl.store(Y + row * F + columns[None, :], (x / denominator).to(Y.dtype.element_ty), inside)
        total += dx
    if PARTIALS is not None:
        share = tl.program_id(1).to(tl.int64)
        tl.store(PARTIALS + share * F + columns, tl.sum(total, 0), columns < F)
