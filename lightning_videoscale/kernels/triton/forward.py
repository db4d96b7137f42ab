"""Forward of the row operations: persistent programs, each of which walks a contiguous range of rows.

Gate, 1 + scale and shift stay in registers while the rows share an entry of the row map.
"""

# mypy: ignore-errors
# The bodies are Triton's language, which is not typed as Python is.
from __future__ import annotations

import triton
import triton.language as tl

from lightning_videoscale.kernels.triton.tiles import (
    add,
    load_row,
    multiply,
    normalized,
    one_plus,
    operand_row,
    round_row,
    store_row,
    tanh_row,
)


@triton.jit(do_not_specialize=["groups"])
def forward_kernel(
    X, BRANCH, H, Y, MEAN, RSTD,
    GATE, GATE_TABLE, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, WEIGHT, BIAS, INDEX,
    x_stride, branch_stride, gate_stride, scale_stride, shift_stride,
    rows, rows_per_program, rows_per_group, groups, eps,
    NORM: tl.constexpr, TANH: tl.constexpr, BRANCH_NORM: tl.constexpr, EAGER: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pointers that a variant lacks are None. NORM is "none", "layer" or "rms". All row offsets are 64-bit.

    With an INDEX to be launched in debug mode, without which Triton leaves the assertion out.
    """
    dtype: tl.constexpr = X.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * rows_per_program
    stop = tl.minimum(start + rows_per_program, rows)
    if WEIGHT is not None:
        weight = load_row(WEIGHT, D, K, BLOCK)
    if BIAS is not None:
        bias = load_row(BIAS, D, K, BLOCK)
    for entry in range(start // rows_per_group, tl.cdiv(stop, rows_per_group)):
        group = entry
        if INDEX is not None:
            group = tl.load(INDEX + entry).to(tl.int64)
            tl.device_assert((group >= 0) & (group < groups), "index out of range")
        if GATE is not None:
            gate = operand_row(GATE, gate_stride, GATE_TABLE, group, dtype, EAGER, D, K, BLOCK)
            if TANH:
                gate = tanh_row(gate, dtype, EAGER, K)
        if SCALE is not None:
            factor = operand_row(SCALE, scale_stride, SCALE_TABLE, group, dtype, EAGER, D, K, BLOCK)
            factor = one_plus(factor, dtype, EAGER, K)
        if SHIFT is not None:
            shift = operand_row(SHIFT, shift_stride, SHIFT_TABLE, group, dtype, EAGER, D, K, BLOCK)
        first = tl.maximum(start, entry * rows_per_group)
        last = tl.minimum(stop, (entry + 1) * rows_per_group)
        for row in tl.range(first, last, num_stages=STAGES):
            x = load_row(X + row * x_stride, D, K, BLOCK)
            if BRANCH is not None:
                branch = load_row(BRANCH + row * branch_stride, D, K, BLOCK)
                if BRANCH_NORM:
                    branch, _, _ = normalized(branch, D, K, BLOCK, eps, LAYER=False)
                if GATE is not None:
                    branch = multiply(branch, gate, K)
                if EAGER:
                    branch = round_row(branch, dtype, K)
                x = round_row(add(x, branch, K), dtype, K)
                store_row(H + row * D, x, True, D, K, BLOCK)
            if NORM != "none":
                y, mean, rstd = normalized(x, D, K, BLOCK, eps, LAYER=NORM == "layer")
                if NORM == "layer":
                    tl.store(MEAN + row, mean)
                tl.store(RSTD + row, rstd)
                if EAGER and NORM == "rms":
                    y = round_row(y, dtype, K)
                if WEIGHT is not None:
                    y = multiply(y, weight, K)
                if BIAS is not None:
                    y = add(y, bias, K)
                if EAGER:
                    y = round_row(y, dtype, K)
                if SCALE is not None:
                    y = multiply(y, factor, K)
                    if EAGER:
                        y = round_row(y, dtype, K)
                if SHIFT is not None:
                    y = add(y, shift, K)
                store_row(Y + row * D, y, True, D, K, BLOCK)
