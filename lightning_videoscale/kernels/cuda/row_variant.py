"""One compiled variant of the row operations: the constants that make it, and what follows from them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.kernels.row_types import Operand, RowMap, RowOp

Direction = Literal["forward", "backward"]
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


class Variant(NamedTuple):
    """Everything a row kernel is specialised on; a dtype is None for what the variant lacks.

    Attributes:
        op: The operation.
        channels: D.
        activation: Dtype of x, branch, h, y and their gradients.
        gate: Of its values.
        gate_table: Of its table.
        scale: Of its values.
        scale_table: Of its table.
        shift: Of its values.
        shift_table: Of its table.
        weight: Of the norm's weight.
        bias: Of the norm's bias.
        per_row: Every row has an operand row of its own.
        indexed: The map has an index.
        has_dh: Backward: h receives a gradient beside the norm's.
    """

    op: RowOp
    channels: int
    activation: torch.dtype
    gate: torch.dtype | None
    gate_table: torch.dtype | None
    scale: torch.dtype | None
    scale_table: torch.dtype | None
    shift: torch.dtype | None
    shift_table: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    per_row: bool
    indexed: bool
    has_dh: bool = False

    def constants(self) -> dict[str, str | int]:
        """Returns the macros of ``csrc/row_config.cuh`` and ``csrc/row_sums.cuh``."""
        dtypes = {
            "ACTIVATION": self.activation,
            "GATE_TYPE": self.gate,
            "GATE_TABLE_TYPE": self.gate_table,
            "SCALE_TYPE": self.scale,
            "SCALE_TABLE_TYPE": self.scale_table,
            "SHIFT_TYPE": self.shift,
            "SHIFT_TABLE_TYPE": self.shift_table,
            "WEIGHT_TYPE": self.weight,
            "BIAS_TYPE": self.bias,
        }
        op = self.op
        return {
            "CHANNELS": self.channels,
            **{name: TYPES[dtype or torch.float32] for name, dtype in dtypes.items()},
            "NORM": {None: 0, "layer": 1, "rms": 2}[op.norm],
            "RESIDUAL": int(op.residual),
            "GATE": {None: 0, "identity": 1, "tanh": 2}[op.gate],
            "BRANCH_NORM": int(op.branch_norm),
            "SCALE": int(self.scale is not None),
            "SHIFT": int(self.shift is not None),
            "WEIGHT": int(self.weight is not None),
            "BIAS": int(self.bias is not None),
            "EAGER_ROUNDING": int(op.rounding == "eager"),
            "PER_ROW_OPERANDS": int(self.per_row),
            "INDEX": int(self.indexed),
            "HAS_DH": int(self.has_dh),
            "SUMS": int(op.sums),
            "BRANCH_SUM": int(op.branch_sum),
            "TABLES": int(self.has_tables),
        }

    @property
    def vectors(self) -> int:
        """16-byte vectors of activations in a row."""
        return self.channels * self.activation.itemsize // 16

    @property
    def has_tables(self) -> bool:
        """Whether gate, scale or shift has a table, as far as backward knows."""
        return self.gate_table is not None or self.scale_table is not None or self.op.shift_table

    @property
    def reads_branch(self) -> bool:
        """Whether backward reads the branch; without gate and norm of the branch its gradient is dx."""
        return self.op.gate is not None or self.op.branch_norm

    def bytes_per_row(self, direction: Direction) -> int:
        """Bytes that enter shared memory per row."""
        if direction == "forward":
            activations, operands = 1 + self.op.residual, (self.gate, self.scale, self.shift)
        else:
            activations = 2 * (self.op.norm is not None) + self.has_dh + self.reads_branch
            operands = (self.gate, self.scale, None)
        widths = [dtype.itemsize for dtype in operands if dtype is not None and self.per_row]
        return self.channels * (activations * self.activation.itemsize + sum(widths))

    @property
    def affine(self) -> bool:
        """Whether the norm has a weight or a bias."""
        return self.weight is not None or self.bias is not None

    @property
    def sums_operands(self) -> bool:
        """Whether backward leaves parts of the sums for gate, scale, shift, weight and bias."""
        return self.op.sums and (not self.per_row or self.has_tables or self.affine)

    @property
    def sums(self) -> int:
        """SUM_COUNT of ``csrc/row_sums.cuh``: sums over rows per column, 0 where backward leaves no parts."""
        of_norm = 0 if self.op.norm is None else 4 if self.per_row and self.affine else 2
        return self.sums_operands * (of_norm + (self.op.gate is not None)) + self.op.branch_sum


def variant_of(
    op: RowOp,
    x: Tensor,
    gate: Operand | None,
    scale: Operand | None,
    shift: Operand | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: RowMap,
    *,
    has_dh: bool = False,
) -> Variant:
    """The variant that these arguments of a backend need."""
    return Variant(
        op,
        x.shape[1],
        x.dtype,
        *_dtypes(gate),
        *_dtypes(scale),
        *_dtypes(shift),
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        per_row=rows.index is None and rows.rows_per_group == 1,
        indexed=rows.index is not None,
        has_dh=has_dh,
    )


def _dtypes(operand: Operand | None) -> tuple[torch.dtype | None, torch.dtype | None]:
    if operand is None:
        return None, None
    return operand.values.dtype, None if operand.table is None else operand.table.dtype
