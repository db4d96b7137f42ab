"""What the row operations have in common: which kernel runs, which modulation belongs to which row, what comes out.

A row operation works on N rows of D channels (N = B·S tokens) and is one of, or both in turn:

    h = residual + act(gate) · branch                       (gate_residual)
    y = norm(h) · weight + bias, then · (1 + scale) + shift (norm_modulate)

`RowOp` names the variant, `RowMap` says which row of gate, scale and shift belongs to which token. Every backend
(`RowBackend`) computes exactly this; the PyTorch reference is the oracle.

"Wide" is float32, or float64 where the activations are that (the reference alone).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

Norm = Literal["layer", "rms"]
Rounding = Literal["fp32_once", "eager"]
Activation = Literal["identity", "tanh"]
NORMS, ROUNDINGS, ACTIVATIONS = get_args(Norm), get_args(Rounding), get_args(Activation)


class RowOp(NamedTuple):
    """One variant of a row operation, a constant at compile time.

    Attributes:
        norm: LayerNorm or RMSNorm of h; None for the gated residual alone.
        residual: Whether h = residual + act(gate) · branch comes first; otherwise h is the input.
        gate: What the gate passes through; None for h = residual + branch.
        branch_norm: RMS-normalise the branch before it is gated (Mochi).
        rounding: "fp32_once" computes in float32 and rounds each output once (h before its statistics are taken);
            "eager" rounds to the activations' dtype after every operation, as PyTorch in bf16 does. It concerns the
            forward; gradients are always computed wide and rounded once.
        sums: Whether backward sums the gradients of gate, scale, shift, weight and bias. False where all of them are
            frozen (LoRA); a backend may compute them nevertheless.
        branch_sum: Whether backward also sums dbranch over all rows: the gradient of the bias of the Linear that the
            branch comes from.
    """

    norm: Norm | None
    residual: bool = False
    gate: Activation | None = None
    branch_norm: bool = False
    rounding: Rounding = "fp32_once"
    sums: bool = True
    branch_sum: bool = False


@dataclass(frozen=True)
class RowMap:
    """Which of G groups a row belongs to, hence which row of gate, scale and shift applies to it.

    ``group(row) = row // rows_per_group`` without an index, ``index[row // rows_per_group]`` with one. Per sample:
    rows_per_group = S; per frame: the tokens of a frame; per token: 1; segments and repeated timesteps: an index.

    Attributes:
        groups: G.
        rows_per_group: Consecutive rows that share an entry, at least 1; N is a multiple of it.
        index: (N / rows_per_group,) int32, each in [0, G), in any order; or None. On a GPU a backend's forward asserts
            the range.
    """

    groups: int
    rows_per_group: int
    index: Tensor | None = None


class Operand(NamedTuple):
    """One of gate, scale and shift: ``values[group] + table``, added in registers, so that no sum is materialised.

    Attributes:
        values: (G, D) of any floating dtype, last dimension contiguous, rows at any stride.
        table: (D,) of any floating dtype, or None.
    """

    values: Tensor
    table: Tensor | None = None


class RowInputs(NamedTuple):
    """What a row operation reads.

    Attributes:
        x: (N, D), the residual where there is a branch; in backward h, which was normalised.
        branch: (N, D), or None. In backward its values count where a gate or its own norm uses them.
        gate: As scale.
        scale: Of the variant's; None where it has none.
        shift: As scale; None in backward, which does not need it.
        weight: (D,), the norm's own, or None.
        bias: As weight.
        rows: Which modulation belongs to which row.
        eps: Added to variances and mean squares.
        mean: (N,) wide, what forward kept; in backward of "layer".
        rstd: (N,) wide, likewise of both norms.
    """

    x: Tensor
    branch: Tensor | None
    gate: Operand | None
    scale: Operand | None
    shift: Operand | None
    weight: Tensor | None
    bias: Tensor | None
    rows: RowMap
    eps: float
    mean: Tensor | None = None
    rstd: Tensor | None = None


class RowVariant(NamedTuple):
    """Everything that a kernel is specialised on, and all that decides whether a backend can run a call.

    A dtype is None for what the call lacks; gate, scale and shift have one, as have their tables, and weight and bias.

    Attributes:
        op: The operation.
        channels: D.
        activation: Dtype of x, h, y and their gradients.
        branch: Dtype of the branch.
        modulation: Dtype of gate, scale and shift.
        table: Dtype of their tables, of which backward knows the shift's too.
        affine: Dtype of weight and bias.
        scale: Whether there is a scale.
        shift: Whether there is a shift; False in backward.
        bias: Whether the norm has a bias.
        per_row: Whether every row has values of its own.
        indexed: Whether the map has an index.
        has_dh: In backward, whether h receives a gradient beside the norm's.
    """

    op: RowOp
    channels: int
    activation: torch.dtype
    branch: torch.dtype | None = None
    modulation: torch.dtype | None = None
    table: torch.dtype | None = None
    affine: torch.dtype | None = None
    scale: bool = False
    shift: bool = False
    bias: bool = False
    per_row: bool = False
    indexed: bool = False
    has_dh: bool = False


def variant_of(op: RowOp, inputs: RowInputs, *, has_dh: bool = False, shift_table: Tensor | None = None) -> RowVariant:
    """Returns the variant of a call; ``shift_table`` is what backward knows of the shift."""
    x, branch, gate, scale, shift, weight, bias, rows, *_ = inputs
    modulation, table = None, None if shift_table is None else shift_table.dtype
    for operand in (gate, scale, shift):
        if operand is not None:
            modulation = operand.values.dtype
            table = table if operand.table is None else operand.table.dtype
    return RowVariant(
        op,
        x.shape[1],
        x.dtype,
        None if branch is None else branch.dtype,
        modulation,
        table,
        None if weight is None else weight.dtype,
        scale is not None,
        shift is not None,
        bias is not None,
        rows.index is None and rows.rows_per_group == 1,
        rows.index is not None,
        has_dh,
    )


class RowOutputs(NamedTuple):
    """What a forward returns; None for what the variant lacks.

    Attributes:
        h: (N, D) in the residual's dtype, where the variant adds a residual.
        y: (N, D) in h's dtype, where the variant normalises.
        mean: (N,), wide, for "layer".
        rstd: (N,), wide, where the variant normalises.
    """

    h: Tensor | None
    y: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


class RowGradients(NamedTuple):
    """What a backward returns; None for what the variant lacks, and for whatever only a missing dy or dh would give.

    Attributes:
        dx: (N, D) of x, which is that of the residual too, in its dtype. None for a variant without a norm, whose
            residual receives dh itself.
        dbranch: (N, D) in the branch's dtype. None for a variant without gate and branch norm, where it is dx; such a
            variant is called with its branch only where that has another dtype.
        dgate: (G, D) wide, as dscale and dshift: of an operand's values, hence of values + table. For maps per token,
            where nothing is summed, they may have the values' dtype already.
        dscale: (G, D) wide.
        dshift: (G, D) wide, wherever there is a scale.
        dweight: (D,) wide.
        dbias: (D,) wide.
        dgate_table: (D,) wide, the sum of dgate over the groups, as the two below. None leaves it to the caller, which
            needs a wide dgate for that; worthwhile for maps per token, where dgate has N rows.
        dscale_table: (D,) wide.
        dshift_table: (D,) wide.
        dbranch_bias: (D,) wide, the sum of dbranch over all rows before that is rounded (of dx where dbranch is dx),
            exactly where ``op.branch_sum``.
    """

    dx: Tensor | None
    dbranch: Tensor | None
    dgate: Tensor | None
    dscale: Tensor | None
    dshift: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dgate_table: Tensor | None = None
    dscale_table: Tensor | None = None
    dshift_table: Tensor | None = None
    dbranch_bias: Tensor | None = None


class RowBackend(Protocol):
    """A module with these three functions (``kernels/reference/rows.py`` and its likes) is a backend.

    dh and dy have h's dtype. Rows of x, branch, dh and dy come at any stride that is a multiple of 16 bytes, if the row
    itself is one, with the last dimension contiguous.
    """

    def limit(self, variant: RowVariant, device: int) -> str | None:
        """Returns why this variant cannot run, forward or backward, on this GPU (-1: the CPU), or None if it can."""

    def forward(self, variant: RowVariant, inputs: RowInputs) -> RowOutputs:
        """Computes h and y, and keeps the statistics of h."""

    def backward(self, variant: RowVariant, inputs: RowInputs, dh: Tensor | None, dy: Tensor | None) -> RowGradients:
        """Computes the gradients from dy and from dh, what reaches h from elsewhere."""
