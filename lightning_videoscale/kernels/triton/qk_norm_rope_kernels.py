"""The kernels of `qk_norm_rope` in Triton.

The first programs walk the rows of q, the others those of k. A program holds a tile of one row: all its heads, or some
of them where heads are independent. The other channel of each pair is a second load of the same addresses, which the
L1 cache serves. Sums over rows are kept by program, hence deterministic.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(block, heads: tl.constexpr, dh: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):
    """The heads and channels of one block of heads, and which of them exist."""
    h = block * BH + tl.arange(0, BH)[:, None]
    c = tl.arange(0, BC)[None, :]
    return h, c, (h < heads) & (c < dh)


@triton.jit
def _other(c, pairs: tl.constexpr, HALF: tl.constexpr):
    """The other channel of each channel's pair, the pair's number, and -1 for its first channel, 1 for its second."""
    if HALF:
        other = tl.where(c < pairs, c + pairs, c - pairs)
        pair = tl.where(c < pairs, c, c - pairs)
        sign = tl.where(c < pairs, -1.0, 1.0)
    else:
        other = c ^ 1
        pair = c // 2
        sign = tl.where(c % 2 == 0, -1.0, 1.0)
    rotated = c < 2 * pairs
    return tl.where(rotated, other, c), tl.where(rotated, pair, 0), sign


@triton.jit
def _turn(row, tokens, h, c, pair, exists, table, pairs: tl.constexpr):
    """Returns cos and sin of a tile, 1 and 0 where nothing is rotated."""
    cos, sin, batch_stride, token_stride, head_stride, start, length = table
    token = row % tokens - start
    at = (row // tokens) * batch_stride + token * token_stride + h * head_stride + pair
    rotated = exists & (c < 2 * pairs) & (token >= 0) & (token < length)
    return tl.load(cos + at, rotated, 1.0), tl.load(sin + at, rotated, 0.0)


@triton.jit
def _affine(x_hat, weight, bias, like, AFFINE: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        x_hat = x_hat.to(like).to(tl.float32)
    if AFFINE:
        x_hat = x_hat * weight
    if BIAS:
        x_hat = x_hat + bias
    return x_hat.to(like).to(tl.float32)


@triton.jit
def _mean(x, width, PER_HEAD: tl.constexpr):
    return (tl.sum(x, 1) / width)[:, None] if PER_HEAD else tl.sum(tl.sum(x, 1), 0) / width


@triton.jit
def _load_parameter(pointer, h, c, exists, dh: tl.constexpr, PER_HEAD: tl.constexpr, GIVEN: tl.constexpr):
    if not GIVEN:
        values = 0.0
    elif PER_HEAD:
        values = tl.load(pointer + c, c < dh, 0.0).to(tl.float32)
    else:
        values = tl.load(pointer + h * dh + c, exists, 0.0).to(tl.float32)
    return values


@triton.jit
def _forward_side(
    program, programs, side, table, eps, heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr, HALF: tl.constexpr, ROUND: tl.constexpr,
    AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    x, y, weight, bias, mean_out, rstd_out, stride, rows, tokens = side
    width: tl.constexpr = dh if PER_HEAD else heads * dh
    like = y.dtype.element_ty
    blocks: tl.constexpr = (heads + BH - 1) // BH
    h, c, exists = _tile(0, heads, dh, BH, BC)
    other, pair, sign = _other(c, pairs, HALF)
    w = _load_parameter(weight, h, c, exists, dh, PER_HEAD, AFFINE)
    w_other = _load_parameter(weight, h, other, exists, dh, PER_HEAD, AFFINE)
    b = _load_parameter(bias, h, c, exists, dh, PER_HEAD, BIAS)
    b_other = _load_parameter(bias, h, other, exists, dh, PER_HEAD, BIAS)
    for unit in range(program, rows * blocks, programs):
        row = tl.cast(unit // blocks, tl.int64)
        h, c, exists = _tile(unit % blocks, heads, dh, BH, BC)
        n = tl.load(x + row * stride + h * dh + c, exists, 0.0).to(tl.float32)
        if pairs > 0:
            m = tl.load(x + row * stride + h * dh + other, exists, 0.0).to(tl.float32)
        if NORM != "none":
            at = row * heads + h if PER_HEAD else row
            kept = h < heads if PER_HEAD else True
            if NORM == "layer":
                mean = _mean(n, width, PER_HEAD)
                tl.store(mean_out + at, mean, kept)
                n = tl.where(exists, n - mean, 0.0)
            if GIVEN:
                rstd = tl.load(rstd_out + at)
            else:
                rstd = tl.rsqrt(_mean(n * n, width, PER_HEAD) + eps)
                tl.store(rstd_out + at, rstd, kept)
            n = _affine(n * rstd, w, b, like, AFFINE, BIAS, ROUND)
            if pairs > 0:
                if NORM == "layer":
                    m = m - mean
                m = _affine(m * rstd, w_other, b_other, like, AFFINE, BIAS, ROUND)
        if pairs > 0:
            cos, sin = _turn(row, tokens, h, c, pair, exists, table, pairs)
            n = n * cos + sign * m * sin
        tl.store(y + row * (heads * dh) + h * dh + c, n.to(like), exists)


@triton.jit
def forward_kernel(
    q, k, table, eps, q_programs, q_heads: tl.constexpr, k_heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr,
    Q_BH: tl.constexpr, K_BH: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    HALF: tl.constexpr, ROUND: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Norms and rotates the rows of both sides; a side is what `_forward_side` unpacks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program < q_programs:
        _forward_side(program, q_programs, q, table, eps, q_heads, dh, pairs, Q_BH, BC, NORM, PER_HEAD, HALF, ROUND,
                      AFFINE, BIAS, GIVEN)  # fmt: skip
    else:
        _forward_side(program - q_programs, programs - q_programs, k, table, eps, k_heads, dh, pairs, K_BH, BC, NORM,
                      PER_HEAD, HALF, ROUND, AFFINE, BIAS, GIVEN)  # fmt: skip


@triton.jit
def _backward_side(
    program, programs, side, table, heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr, HALF: tl.constexpr, AFFINE: tl.constexpr,
    BIAS: tl.constexpr, GIVEN: tl.constexpr, SUMS_ONLY: tl.constexpr,
):  # fmt: skip
    dy, x, dx, weight, mean_in, rstd_in, row_means, dweight, dbias, dy_stride, stride, rows, tokens = side
    width: tl.constexpr = dh if PER_HEAD else heads * dh
    blocks: tl.constexpr = (heads + BH - 1) // BH
    h, c, exists = _tile(0, heads, dh, BH, BC)
    other, pair, sign = _other(c, pairs, HALF)
    w = _load_parameter(weight, h, c, exists, dh, PER_HEAD, AFFINE)
    weight_sum = tl.zeros((BH, BC), tl.float32)
    bias_sum = tl.zeros((BH, BC), tl.float32)
    for unit in range(program, rows * blocks, programs):
        row = tl.cast(unit // blocks, tl.int64)
        h, c, exists = _tile(unit % blocks, heads, dh, BH, BC)
        g = tl.load(dy + row * dy_stride + h * dh + c, exists, 0.0).to(tl.float32)
        if pairs > 0:
            g_other = tl.load(dy + row * dy_stride + h * dh + other, exists, 0.0).to(tl.float32)
            cos, sin = _turn(row, tokens, h, c, pair, exists, table, pairs)
            g = g * cos - sign * g_other * sin
        if NORM != "none":
            at = row * heads + h if PER_HEAD else row
            kept = h < heads if PER_HEAD else True
            rstd = tl.load(rstd_in + at, kept)
            x_hat = tl.load(x + row * stride + h * dh + c, exists, 0.0).to(tl.float32)
            if NORM == "layer":
                x_hat = tl.where(exists, x_hat - tl.load(mean_in + at, kept), 0.0)
            x_hat = x_hat * rstd
            weight_sum += g * x_hat
            bias_sum += g
            if AFFINE:
                g = g * w
            if SUMS_ONLY:
                tl.store(row_means + row, tl.sum(tl.sum(g * x_hat, 1), 0))
            else:
                along = tl.load(row_means + row) if GIVEN else _mean(g * x_hat, width, PER_HEAD)
                if NORM == "layer":
                    along_one = _mean(g, width, PER_HEAD)
                    g = g - along_one
                g = (g - x_hat * along) * rstd
        if not SUMS_ONLY:
            tl.store(dx + row * (heads * dh) + h * dh + c, g.to(dx.dtype.element_ty), exists)
    if AFFINE and not SUMS_ONLY:
        if PER_HEAD:
            tl.store(dweight + program * dh + c, tl.sum(weight_sum, 0)[None, :], c < dh)
            if BIAS:
                tl.store(dbias + program * dh + c, tl.sum(bias_sum, 0)[None, :], c < dh)
        else:
            h, c, exists = _tile(0, heads, dh, BH, BC)
            tl.store(dweight + program * (heads * dh) + h * dh + c, weight_sum, exists)
            if BIAS:
                tl.store(dbias + program * (heads * dh) + h * dh + c, bias_sum, exists)


@triton.jit
def backward_kernel(
    q, k, table, q_programs, q_heads: tl.constexpr, k_heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr,
    Q_BH: tl.constexpr, K_BH: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    HALF: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr, SUMS_ONLY: tl.constexpr,
):  # fmt: skip
    """Differentiates both sides, or, with SUMS_ONLY, leaves their rows' sums of dx̂ · x̂."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program < q_programs:
        _backward_side(program, q_programs, q, table, q_heads, dh, pairs, Q_BH, BC, NORM, PER_HEAD, HALF, AFFINE, BIAS,
                       GIVEN, SUMS_ONLY)  # fmt: skip
    else:
        _backward_side(program - q_programs, programs - q_programs, k, table, k_heads, dh, pairs, K_BH, BC, NORM,
                       PER_HEAD, HALF, AFFINE, BIAS, GIVEN, SUMS_ONLY)  # fmt: skip


@triton.jit
def square_sums_kernel(x, out, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the squares of one row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + c, c < D, 0.0).to(tl.float32)
    tl.store(out + row, tl.sum(values * values, 0))
