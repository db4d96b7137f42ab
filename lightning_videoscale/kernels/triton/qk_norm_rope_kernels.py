"""The kernels of `qk_norm_rope` in Triton.

The first programs walk the rows of q, the others those of k. A program holds a tile of one row: all its heads, or some
of them where heads are independent; as two halves, the first and the second channels of its pairs, so that rotating
moves nothing between threads and every load is wide. Sums over rows are kept by program, hence deterministic.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _channels(i, dh: tl.constexpr, pairs: tl.constexpr):
    """Layout half: the two channels of pair i; past the pairs, the channels that are not rotated by twos."""
    return tl.where(i < pairs, i, i + pairs), tl.where(i < pairs, i + pairs, i + dh // 2)


@triton.jit
def _load_pairs(pointer, at, exists, dh: tl.constexpr, pairs: tl.constexpr, BC: tl.constexpr, HALF: tl.constexpr):
    """First and second channels of all pairs, float32, of heads that begin at ``at`` (heads, 1)."""
    if HALF:
        i = tl.arange(0, BC // 2)[None, :]
        first, second = _channels(i, dh, pairs)
        a = tl.load(pointer + at + first, exists & (i < dh // 2), 0.0)
        b = tl.load(pointer + at + second, exists & (i < dh // 2), 0.0)
    else:
        c = tl.arange(0, BC)[None, :]
        both = tl.load(pointer + at + c, exists & (c < dh), 0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], BC // 2, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(
    pointer, at, a, b, exists, dh: tl.constexpr, pairs: tl.constexpr, BC: tl.constexpr, HALF: tl.constexpr
):
    like = pointer.dtype.element_ty
    if HALF:
        i = tl.arange(0, BC // 2)[None, :]
        first, second = _channels(i, dh, pairs)
        tl.store(pointer + at + first, a.to(like), exists & (i < dh // 2))
        tl.store(pointer + at + second, b.to(like), exists & (i < dh // 2))
    else:
        c = tl.arange(0, BC)[None, :]
        both = tl.reshape(tl.join(a.to(like), b.to(like)), (a.shape[0], BC))
        tl.store(pointer + at + c, both, exists & (c < dh))


@triton.jit
def _angles(row, tokens, h, exists, table, pairs: tl.constexpr, BC: tl.constexpr, BY_HEAD: tl.constexpr):
    """Returns cos and sin of all pairs, 1 and 0 where nothing is rotated."""
    cos, sin, cos_sample, cos_token, cos_head, cos_pair, sin_sample, sin_token, sin_head, sin_pair, start, length = (
        table
    )
    token = row % tokens - start
    sample = row // tokens
    i = tl.arange(0, BC // 2)[None, :]
    rotated = (i < pairs) & (token >= 0) & (token < length)
    cos_at = sample * cos_sample + token * cos_token + i * cos_pair
    sin_at = sample * sin_sample + token * sin_token + i * sin_pair
    if BY_HEAD:
        cos_at += h * cos_head
        sin_at += h * sin_head
        rotated = rotated & exists
    return tl.load(cos + cos_at, rotated, 1.0), tl.load(sin + sin_at, rotated, 0.0)


@triton.jit
def _affine(
    x_hat, weight, bias, like, AFFINE: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr,
    ROUND_NORMED: tl.constexpr,
):  # fmt: skip
    if ROUND:
        x_hat = x_hat.to(like).to(tl.float32)
    if AFFINE:
        x_hat = x_hat * weight
    if BIAS:
        x_hat = x_hat + bias
    if ROUND_NORMED:
        x_hat = x_hat.to(like).to(tl.float32)
    return x_hat


@triton.jit
def _mean(a, b, width, PER_HEAD: tl.constexpr):
    both = tl.sum(a + b, 1)
    return (both / width)[:, None] if PER_HEAD else tl.sum(both, 0) / width


@triton.jit
def _load_parameter(
    pointer, h, exists, dh: tl.constexpr, pairs: tl.constexpr, BC: tl.constexpr, HALF: tl.constexpr,
    PER_HEAD: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    if not GIVEN:
        values = 0.0, 0.0
    elif PER_HEAD:
        one = tl.zeros((1, 1), tl.int32)
        values = _load_pairs(pointer, one, one == 0, dh, pairs, BC, HALF)
    else:
        values = _load_pairs(pointer, h * dh, exists, dh, pairs, BC, HALF)
    return values


@triton.jit
def _forward_side(
    program, programs, side, table, eps, heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr, HALF: tl.constexpr, TABLE_HEADS: tl.constexpr,
    ROUND: tl.constexpr, ROUND_NORMED: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    x, y, weight, bias, mean_out, rstd_out, stride, rows, tokens = side
    width: tl.constexpr = dh if PER_HEAD else heads * dh
    like = y.dtype.element_ty
    blocks: tl.constexpr = (heads + BH - 1) // BH
    i = tl.arange(0, BC // 2)[None, :]
    h = tl.arange(0, BH)[:, None]
    wa, wb = _load_parameter(weight, h, h < heads, dh, pairs, BC, HALF, PER_HEAD, AFFINE)
    ba, bb = _load_parameter(bias, h, h < heads, dh, pairs, BC, HALF, PER_HEAD, BIAS)
    for unit in range(program, rows * blocks, programs):
        row = tl.cast(unit // blocks, tl.int64)
        h = unit % blocks * BH + tl.arange(0, BH)[:, None]
        exists = h < heads
        a, b = _load_pairs(x, row * stride + h * dh, exists, dh, pairs, BC, HALF)
        if NORM != "none":
            at = row * heads + h if PER_HEAD else row
            kept = exists if PER_HEAD else True
            if NORM == "layer":
                mean = _mean(a, b, width, PER_HEAD)
                tl.store(mean_out + at, mean, kept)
                a = tl.where(exists & (i < dh // 2), a - mean, 0.0)
                b = tl.where(exists & (i < dh // 2), b - mean, 0.0)
            if GIVEN:
                rstd = tl.load(rstd_out + at)
            else:
                rstd = tl.rsqrt(_mean(a * a, b * b, width, PER_HEAD) + eps)
                tl.store(rstd_out + at, rstd, kept)
            a = _affine(a * rstd, wa, ba, like, AFFINE, BIAS, ROUND, ROUND_NORMED)
            b = _affine(b * rstd, wb, bb, like, AFFINE, BIAS, ROUND, ROUND_NORMED)
        if pairs > 0:
            cos, sin = _angles(row, tokens, h, exists, table, pairs, BC, TABLE_HEADS)
            a, b = a * cos - b * sin, a * sin + b * cos
        _store_pairs(y, row * (heads * dh) + h * dh, a, b, exists, dh, pairs, BC, HALF)


@triton.jit
def forward_kernel(
    q, k, table, eps, q_programs, q_heads: tl.constexpr, k_heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr,
    Q_BH: tl.constexpr, K_BH: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    HALF: tl.constexpr, TABLE_HEADS: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
    ROUND: tl.constexpr, ROUND_NORMED: tl.constexpr,
):  # fmt: skip
    """Norms and rotates the rows of both sides; a side is what `_forward_side` unpacks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program < q_programs:
        _forward_side(program, q_programs, q, table, eps, q_heads, dh, pairs, Q_BH, BC, NORM, PER_HEAD, HALF,
                      TABLE_HEADS, ROUND, ROUND_NORMED, AFFINE, BIAS, GIVEN)  # fmt: skip
    else:
        _forward_side(program - q_programs, programs - q_programs, k, table, eps, k_heads, dh, pairs, K_BH, BC, NORM,
                      PER_HEAD, HALF, TABLE_HEADS, ROUND, ROUND_NORMED, AFFINE, BIAS, GIVEN)  # fmt: skip


@triton.jit
def _store_sums(
    pointer, program, a, b, heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, HALF: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """A program's sums over its rows, and with statistics per head over its heads."""
    if PER_HEAD:
        at = tl.zeros((1, 1), tl.int32) + program * dh
        a, b = tl.sum(a, 0)[None, :], tl.sum(b, 0)[None, :]
        _store_pairs(pointer, at, a, b, at >= 0, dh, pairs, BC, HALF)
    else:
        h = tl.arange(0, BH)[:, None]
        _store_pairs(pointer, program * (heads * dh) + h * dh, a, b, h < heads, dh, pairs, BC, HALF)


@triton.jit
def _backward_side(
    program, programs, side, table, heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr, HALF: tl.constexpr, TABLE_HEADS: tl.constexpr,
    AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr, SUMS_ONLY: tl.constexpr, DX_SUMS: tl.constexpr,
):  # fmt: skip
    dy, x, dx, weight, mean_in, rstd_in, row_means, dweight, dbias, dx_sums, dy_stride, stride, rows, tokens = side
    width: tl.constexpr = dh if PER_HEAD else heads * dh
    blocks: tl.constexpr = (heads + BH - 1) // BH
    i = tl.arange(0, BC // 2)[None, :]
    h = tl.arange(0, BH)[:, None]
    wa, wb = _load_parameter(weight, h, h < heads, dh, pairs, BC, HALF, PER_HEAD, AFFINE)
    weight_a = tl.zeros((BH, BC // 2), tl.float32)
    weight_b = tl.zeros((BH, BC // 2), tl.float32)
    bias_a = tl.zeros((BH, BC // 2), tl.float32)
    bias_b = tl.zeros((BH, BC // 2), tl.float32)
    dx_a = tl.zeros((BH, BC // 2), tl.float32)
    dx_b = tl.zeros((BH, BC // 2), tl.float32)
    for unit in range(program, rows * blocks, programs):
        row = tl.cast(unit // blocks, tl.int64)
        h = unit % blocks * BH + tl.arange(0, BH)[:, None]
        exists = h < heads
        a, b = _load_pairs(dy, row * dy_stride + h * dh, exists, dh, pairs, BC, HALF)
        if NORM != "none":
            xa, xb = _load_pairs(x, row * stride + h * dh, exists, dh, pairs, BC, HALF)
        if pairs > 0:
            cos, sin = _angles(row, tokens, h, exists, table, pairs, BC, TABLE_HEADS)
            a, b = a * cos + b * sin, b * cos - a * sin
        if NORM != "none":
            at = row * heads + h if PER_HEAD else row
            rstd = tl.load(rstd_in + at, exists if PER_HEAD else True)
            if NORM == "layer":
                mean = tl.load(mean_in + at, exists if PER_HEAD else True)
                xa = tl.where(exists & (i < dh // 2), xa - mean, 0.0)
                xb = tl.where(exists & (i < dh // 2), xb - mean, 0.0)
            xa, xb = xa * rstd, xb * rstd
            weight_a += a * xa
            weight_b += b * xb
            bias_a += a
            bias_b += b
            if AFFINE:
                a, b = a * wa, b * wb
            if SUMS_ONLY:
                tl.store(row_means + row, _mean(a * xa, b * xb, 1, False))
            else:
                along = tl.load(row_means + row) if GIVEN else _mean(a * xa, b * xb, width, PER_HEAD)
                if NORM == "layer":
                    along_one = _mean(a, b, width, PER_HEAD)
                    a, b = a - along_one, b - along_one
                a, b = (a - xa * along) * rstd, (b - xb * along) * rstd
        if not SUMS_ONLY:
            _store_pairs(dx, row * (heads * dh) + h * dh, a, b, exists, dh, pairs, BC, HALF)
        if DX_SUMS:
            dx_a += a
            dx_b += b
    if DX_SUMS:
        h = program % blocks * BH + tl.arange(0, BH)[:, None]
        _store_pairs(
            dx_sums, program // blocks * (heads * dh) + h * dh, dx_a, dx_b, h < heads, dh, pairs, BC, HALF
        )  # fmt: skip
    if AFFINE and not SUMS_ONLY:
        _store_sums(dweight, program, weight_a, weight_b, heads, dh, pairs, BH, BC, HALF, PER_HEAD)
        if BIAS:
            _store_sums(dbias, program, bias_a, bias_b, heads, dh, pairs, BH, BC, HALF, PER_HEAD)


@triton.jit
def backward_kernel(
    q, k, table, q_programs, q_heads: tl.constexpr, k_heads: tl.constexpr, dh: tl.constexpr, pairs: tl.constexpr,
    Q_BH: tl.constexpr, K_BH: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    HALF: tl.constexpr, TABLE_HEADS: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
    SUMS_ONLY: tl.constexpr, DX_SUMS: tl.constexpr,
):  # fmt: skip
    """Differentiates both sides, or, with SUMS_ONLY, leaves their rows' sums of dx̂ · x̂."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program < q_programs:
        _backward_side(program, q_programs, q, table, q_heads, dh, pairs, Q_BH, BC, NORM, PER_HEAD, HALF, TABLE_HEADS,
                       AFFINE, BIAS, GIVEN, SUMS_ONLY, DX_SUMS)  # fmt: skip
    else:
        _backward_side(program - q_programs, programs - q_programs, k, table, k_heads, dh, pairs, K_BH, BC, NORM,
                       PER_HEAD, HALF, TABLE_HEADS, AFFINE, BIAS, GIVEN, SUMS_ONLY, DX_SUMS)  # fmt: skip


@triton.jit
def square_sums_kernel(x, out, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the squares of one row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + c, c < D, 0.0).to(tl.float32)
    tl.store(out + row, tl.sum(values * values, 0))
