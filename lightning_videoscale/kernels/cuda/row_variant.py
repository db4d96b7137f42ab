"""What the CUDA row kernels need to know of a variant: its constants, and what follows from them."""

from __future__ import annotations

from typing import Literal

import torch

from lightning_videoscale.kernels.row_types import RowVariant

Direction = Literal["forward", "backward"]
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


def constants(variant: RowVariant) -> dict[str, str | int]:
    """Returns the macros of ``csrc/row_config.cuh`` and ``csrc/row_sums.cuh``."""
    op = variant.op
    return {
        "CHANNELS": variant.channels,
        "ACTIVATION": TYPES[variant.activation],
        "MODULATION_TYPE": TYPES[variant.modulation or torch.float32],
        "TABLE_TYPE": TYPES[variant.table or torch.float32],
        "AFFINE_TYPE": TYPES[variant.affine or torch.float32],
        "NORM": {None: 0, "layer": 1, "rms": 2}[op.norm],
        "RESIDUAL": int(op.residual),
        "GATE": {None: 0, "identity": 1, "tanh": 2}[op.gate],
        "BRANCH_NORM": int(op.branch_norm),
        "SCALE": int(variant.scale),
        "SHIFT": int(variant.shift),
        "WEIGHT": int(variant.affine is not None),
        "BIAS": int(variant.bias),
        "EAGER_ROUNDING": int(op.rounding == "eager"),
        "PER_ROW_OPERANDS": int(variant.per_row),
        "INDEX": int(variant.indexed),
        "HAS_DH": int(variant.has_dh),
        "SUMS": int(op.sums),
        "BRANCH_SUM": int(op.branch_sum),
        "TABLES": int(variant.table is not None),
    }


def vectors(variant: RowVariant) -> int:
    """16-byte vectors of activations in a row."""
    return variant.channels * variant.activation.itemsize // 16


def bytes_per_row(variant: RowVariant, direction: Direction) -> int:
    """Bytes that enter shared memory per row."""
    op = variant.op
    operands = (op.gate is not None) + variant.scale
    if direction == "forward":
        activations, operands = 1 + op.residual, operands + variant.shift
    else:
        # Without gate and norm of the branch its gradient is dx, and it is not read.
        reads_branch = op.gate is not None or op.branch_norm
        activations = 2 * (op.norm is not None) + variant.has_dh + reads_branch
    width = variant.modulation.itemsize if variant.modulation is not None and variant.per_row else 0
    return variant.channels * (activations * variant.activation.itemsize + operands * width)


def sums_operands(variant: RowVariant) -> bool:
    """Whether backward leaves parts of the sums for gate, scale, shift, weight and bias."""
    return variant.op.sums and (not variant.per_row or variant.table is not None or variant.affine is not None)


def sum_count(variant: RowVariant) -> int:
    """SUM_COUNT of ``csrc/row_sums.cuh``: sums over rows per column, 0 where backward leaves no parts."""
    op = variant.op
    of_norm = 0 if op.norm is None else 4 if variant.per_row and variant.affine is not None else 2
    return sums_operands(variant) * (of_norm + (op.gate is not None)) + op.branch_sum
