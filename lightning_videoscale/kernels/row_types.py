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
    shift_table: bool = False


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

    def objection(
        self,
        op: RowOp,
        x: Tensor,
        branch: Tensor | None,
        operands: tuple[Operand, ...],
        affine: tuple[Tensor, ...],
        rows: RowMap,
    ) -> str | None:
        """Returns why this variant cannot run, forward or backward, on tensors like these, or None if it can."""

    def forward(
        self,
        op: RowOp,
        x: Tensor,
        branch: Tensor | None,
        gate: Operand | None,
        scale: Operand | None,
        shift: Operand | None,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: RowMap,
        eps: float,
    ) -> RowOutputs:
        """Computes h and y of x (N, D), the residual where ``op.residual``, and keeps the statistics of h."""

    def backward(
        self,
        op: RowOp,
        dh: Tensor | None,
        dy: Tensor | None,
        h: Tensor,
        branch: Tensor | None,
        gate: Operand | None,
        scale: Operand | None,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor | None,
        rows: RowMap,
        eps: float,
    ) -> RowGradients:
        """Computes the gradients; dh is what reaches h from elsewhere, h the normed input (x where no residual)."""
