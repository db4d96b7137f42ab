"""A row of D channels in registers: a tuple of K tiles of BLOCK channels, of which only the last may be padded.

One power of two would have to be 8192 for 5120 channels and leave 37 % of the lanes idle. Padded lanes hold zero.
Rows are float32.
"""

# ruff: noqa: RUF005
# mypy: ignore-errors
# The bodies are Triton's language, which is not typed as Python is.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row(pointer, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Loads D contiguous elements."""
    lanes = tl.arange(0, BLOCK)
    row = ()
    for i in tl.static_range(K):
        row = row + (tl.load(pointer + i * BLOCK + lanes, i * BLOCK + lanes < D, 0.0).to(tl.float32),)
    return row


@triton.jit
def store_row(pointer, row, mask, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Stores D contiguous elements, rounded to the pointer's dtype, where ``mask`` (a scalar) holds."""
    lanes = tl.arange(0, BLOCK)
    for i in tl.static_range(K):
        tl.store(pointer + i * BLOCK + lanes, row[i].to(pointer.dtype.element_ty), (i * BLOCK + lanes < D) & mask)


@triton.jit
def zero_row(K: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a row of zeros."""
    row = ()
    for _ in tl.static_range(K):
        row = row + (tl.zeros((BLOCK,), tl.float32),)
    return row


@triton.jit
def cleared(row, mask, K: tl.constexpr):
    """Returns zeros where ``mask`` (a scalar) holds, else the row."""
    kept = ()
    for i in tl.static_range(K):
        kept = kept + (tl.where(mask, 0.0, row[i]),)
    return kept


@triton.jit
def round_row(row, dtype: tl.constexpr, K: tl.constexpr):
    """Rounds to ``dtype`` and goes on in float32."""
    rounded = ()
    for i in tl.static_range(K):
        rounded = rounded + (row[i].to(dtype).to(tl.float32),)
    return rounded


@triton.jit
def add(a, b, K: tl.constexpr):
    """Returns a + b of two rows."""
    total = ()
    for i in tl.static_range(K):
        total = total + (a[i] + b[i],)
    return total


@triton.jit
def multiply(a, b, K: tl.constexpr):
    """Returns a · b of two rows."""
    product = ()
    for i in tl.static_range(K):
        product = product + (a[i] * b[i],)
    return product


@triton.jit
def scaled(a, factor, K: tl.constexpr):
    """Returns a row times a number."""
    product = ()
    for i in tl.static_range(K):
        product = product + (a[i] * factor,)
    return product


@triton.jit
def row_dot(a, b, K: tl.constexpr):
    """Returns Σ a · b; the tiles are added before lanes are, so that lanes meet only once."""
    total = a[0] * b[0]
    for i in tl.static_range(1, K):
        total += a[i] * b[i]
    return tl.sum(total)


@triton.jit
def row_sum(a, K: tl.constexpr):
    """Returns Σ a."""
    total = a[0]
    for i in tl.static_range(1, K):
        total += a[i]
    return tl.sum(total)


@triton.jit
def shifted(a, offset, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a - offset, where padded lanes stay zero."""
    lanes = tl.arange(0, BLOCK)
    difference = ()
    for i in tl.static_range(K):
        difference = difference + (tl.where(i * BLOCK + lanes < D, a[i] - offset, 0.0),)
    return difference


@triton.jit
def normalized(a, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, eps, LAYER: tl.constexpr):
    """Returns x̂, mean and rstd; the variance comes from centred values, never from E[x²] - mean²."""
    mean = 0.0
    if LAYER:
        mean = row_sum(a, K) / D
        a = shifted(a, mean, D, K, BLOCK)
    rstd = tl.rsqrt(row_dot(a, a, K) / D + eps)
    return scaled(a, rstd, K), mean, rstd


@triton.jit
def _tanh(x):
    """Tanh to float32's rounding: a series where 1 - exp(-2|x|) would cancel."""
    square = x * x
    series = 62.0 / 2835.0 + square * (-1382.0 / 155925.0 + square * (21844.0 / 6081075.0))
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * series))))
    decay = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def operand_row(
    values, stride, table, group, dtype: tl.constexpr, EAGER: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns values[group] + table."""
    row = load_row(values + group * stride, D, K, BLOCK)
    if table is not None:
        row = add(row, load_row(table, D, K, BLOCK), K)
    if EAGER:
        row = round_row(row, dtype, K)
    return row


@triton.jit
def tanh_row(row, dtype: tl.constexpr, EAGER: tl.constexpr, K: tl.constexpr):
    """Returns tanh of a row."""
    activated = ()
    for i in tl.static_range(K):
        activated = activated + (_tanh(row[i]),)
    if EAGER:
        activated = round_row(activated, dtype, K)
    return activated


@triton.jit
def one_plus(row, dtype: tl.constexpr, EAGER: tl.constexpr, K: tl.constexpr):
    """Returns 1 + row."""
    factor = ()
    for i in tl.static_range(K):
        factor = factor + (1.0 + row[i],)
    if EAGER:
        factor = round_row(factor, dtype, K)
    return factor
