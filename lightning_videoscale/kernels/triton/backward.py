"""Backward of the row operations in one pass: dx, dbranch and the sums from a single read of dy, dh, h and the branch.

Programs walk contiguous ranges of rows, in the order of their groups where an index scatters these. Of each group that
a program meets it keeps its sums in registers and leaves them in a slot of its own (`finalize` adds the slots):

    A = Σ dy · x̂,  B = Σ dy,  C = Σ dh' · branch     with dh' the whole gradient of h,

from which the gradients of scale, shift, weight, bias and gate all follow; and Σ dbranch, that of the branch's bias.
"""

# ruff: noqa: RUF005, SIM108
# mypy: ignore-errors
# The bodies are Triton's language, which is not typed as Python is.
from __future__ import annotations

import triton
import triton.language as tl

from lightning_videoscale.kernels.triton.tiles import (
    add,
    cleared,
    load_row,
    multiply,
    normalized,
    one_plus,
    operand_row,
    row_dot,
    row_sum,
    scaled,
    shifted,
    store_row,
    tanh_row,
    zero_row,
)


@triton.jit
def _norm_backward(dx_hat, x_hat, rstd, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr):
    """Returns rstd · (dx̂ - mean(dx̂) - x̂ · mean(dx̂ · x̂)), without mean(dx̂) for a RMSNorm."""
    along = -row_dot(dx_hat, x_hat, K) / D
    if LAYER:
        mean = row_sum(dx_hat, K) / D
        # One channel has no gradient; a fused multiply-add would leave that of a rounding error.
        dx_hat = shifted(dx_hat, mean, D, K, BLOCK) if D > 1 else zero_row(K, BLOCK)
    return scaled(add(dx_hat, scaled(x_hat, along, K), K), rstd, K)


@triton.jit
def _tanh_slope(gate, K: tl.constexpr):
    slope = ()
    for i in tl.static_range(K):
        slope = slope + (1.0 - gate[i] * gate[i],)
    return slope


@triton.jit
def backward_kernel(
    DH, DY, X, BRANCH, DX, DBRANCH, MEAN, RSTD,
    GATE, GATE_TABLE, SCALE, SCALE_TABLE, WEIGHT, BIAS, INDEX, ORDER,
    DGATE, DSCALE, DSHIFT, SUM_A, SUM_B, SUM_C, SUM_WEIGHT, SUM_BIAS, SUM_BRANCH,
    dh_stride, dy_stride, x_stride, branch_stride, gate_stride, scale_stride,
    rows, rows_per_program, rows_per_group, eps,
    NORM: tl.constexpr, TANH: tl.constexpr, BRANCH_NORM: tl.constexpr, PER_ROW: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pointers that a variant lacks are None; all row offsets are 64-bit.

    PER_ROW: every row is a group of its own, hence the gradients of the operands' values are written row by row (DGATE,
    DSCALE, DSHIFT) and the sums run over all rows, for tables and for weight and bias.
    """
    dtype: tl.constexpr = X.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    start = program * rows_per_program
    stop = tl.minimum(start + rows_per_program, rows)
    end = tl.cdiv(stop, rows_per_group)
    sum_a, sum_b, sum_c = zero_row(K, BLOCK), zero_row(K, BLOCK), zero_row(K, BLOCK)
    sum_weight, sum_bias, sum_branch = zero_row(K, BLOCK), zero_row(K, BLOCK), zero_row(K, BLOCK)
    if WEIGHT is not None:
        weight = load_row(WEIGHT, D, K, BLOCK)
    for position in range(start // rows_per_group, end):
        entry, group, flush = position, position, True
        if INDEX is not None:
            entry = tl.load(ORDER + position).to(tl.int64)
            group = tl.load(INDEX + entry).to(tl.int64)
            following = tl.load(INDEX + tl.load(ORDER + tl.minimum(position + 1, end - 1)))
            flush = (position + 1 == end) | (following != group)
        if GATE is not None:
            gate = operand_row(GATE, gate_stride, GATE_TABLE, group, dtype, False, D, K, BLOCK)
            if TANH:
                gate = tanh_row(gate, dtype, False, K)
        if SCALE is not None:
            factor = operand_row(SCALE, scale_stride, SCALE_TABLE, group, dtype, False, D, K, BLOCK)
            factor = one_plus(factor, dtype, False, K)
        first = tl.maximum(start, position * rows_per_group)
        last = tl.minimum(stop, (position + 1) * rows_per_group)
        offset = (entry - position) * rows_per_group
        for place in tl.range(first, last, num_stages=STAGES):
            row = place + offset
            if DH is not None:
                dh = load_row(DH + row * dh_stride, D, K, BLOCK)
            if NORM != "none":
                dy = load_row(DY + row * dy_stride, D, K, BLOCK)
                x_hat = load_row(X + row * x_stride, D, K, BLOCK)
                rstd = tl.load(RSTD + row)
                if NORM == "layer":
                    x_hat = shifted(x_hat, tl.load(MEAN + row), D, K, BLOCK)
                x_hat = scaled(x_hat, rstd, K)
                dnormed = dy
                if SCALE is not None:
                    dnormed = multiply(dy, factor, K)
                dx_hat = dnormed
                if WEIGHT is not None:
                    dx_hat = multiply(dnormed, weight, K)
                dx = _norm_backward(dx_hat, x_hat, rstd, D, K, BLOCK, LAYER=NORM == "layer")
                if DH is not None:
                    dh = add(dh, dx, K)
                else:
                    dh = dx
                store_row(DX + row * D, dh, True, D, K, BLOCK)
                if SUM_A is not None:
                    sum_a = add(sum_a, multiply(dy, x_hat, K), K)
                if SUM_B is not None:
                    sum_b = add(sum_b, dy, K)
                if SUM_WEIGHT is not None:
                    sum_weight = add(sum_weight, multiply(dnormed, x_hat, K), K)
                if SUM_BIAS is not None:
                    sum_bias = add(sum_bias, dnormed, K)
                if DSCALE is not None:
                    normed = x_hat
                    if WEIGHT is not None:
                        normed = multiply(normed, weight, K)
                    if BIAS is not None:
                        normed = add(normed, load_row(BIAS, D, K, BLOCK), K)
                    store_row(DSCALE + row * D, multiply(dy, normed, K), True, D, K, BLOCK)
                if DSHIFT is not None:
                    store_row(DSHIFT + row * D, dy, True, D, K, BLOCK)
            dbranch = dh
            if GATE is not None:
                branch = load_row(BRANCH + row * branch_stride, D, K, BLOCK)
                dbranch = multiply(dh, gate, K)
                if BRANCH_NORM:
                    branch, _, branch_rstd = normalized(branch, D, K, BLOCK, eps, LAYER=False)
                    dbranch = _norm_backward(dbranch, branch, branch_rstd, D, K, BLOCK, LAYER=False)
                dgate = multiply(dh, branch, K)
                if PER_ROW and TANH:
                    dgate = multiply(dgate, _tanh_slope(gate, K), K)
                if SUM_C is not None:
                    sum_c = add(sum_c, dgate, K)
                if DGATE is not None:
                    store_row(DGATE + row * D, dgate, True, D, K, BLOCK)
            if DBRANCH is not None:
                store_row(DBRANCH + row * D, dbranch, True, D, K, BLOCK)
            if SUM_BRANCH is not None:
                sum_branch = add(sum_branch, dbranch, K)
        if not PER_ROW:
            slot = (program + group) * D
            if SUM_A is not None:
                store_row(SUM_A + slot, sum_a, flush, D, K, BLOCK)
                sum_a = cleared(sum_a, flush, K)
            if SUM_B is not None:
                store_row(SUM_B + slot, sum_b, flush, D, K, BLOCK)
                sum_b = cleared(sum_b, flush, K)
            if SUM_C is not None:
                store_row(SUM_C + slot, sum_c, flush, D, K, BLOCK)
                sum_c = cleared(sum_c, flush, K)
            if SUM_BRANCH is not None:
                store_row(SUM_BRANCH + slot, sum_branch, flush, D, K, BLOCK)
                sum_branch = cleared(sum_branch, flush, K)
    if PER_ROW:
        slot = program * D
        if SUM_A is not None:
            store_row(SUM_A + slot, sum_a, True, D, K, BLOCK)
        if SUM_B is not None:
            store_row(SUM_B + slot, sum_b, True, D, K, BLOCK)
        if SUM_C is not None:
            store_row(SUM_C + slot, sum_c, True, D, K, BLOCK)
        if SUM_WEIGHT is not None:
            store_row(SUM_WEIGHT + slot, sum_weight, True, D, K, BLOCK)
        if SUM_BIAS is not None:
            store_row(SUM_BIAS + slot, sum_bias, True, D, K, BLOCK)
        if SUM_BRANCH is not None:
            store_row(SUM_BRANCH + slot, sum_branch, True, D, K, BLOCK)
