"""What the row operations have in common: which kernel runs, and which modulation belongs to which row.

A row operation works on N rows of D channels (N = B·S tokens) and is one of, or both in turn:

    h = residual + act(gate) · branch                       (gate_residual)
    y = norm(h) · weight + bias, then · (1 + scale) + shift (norm_modulate)

`RowOp` names the variant, `RowMap` says which row of gate, scale and shift belongs to which token. Every backend
computes exactly this; the PyTorch reference is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Norm = Literal["layer", "rms"]
Rounding = Literal["fp32_once", "eager"]
Activation = Literal["identity", "tanh"]


@dataclass(frozen=True)
class RowOp:
    """One variant of a row operation, a constant at compile time.

    Attributes:
        norm: LayerNorm or RMSNorm of h; None for the gated residual alone.
        residual: Whether h = residual + act(gate) · branch comes first; otherwise h is the input.
        gate: What the gate passes through; None for h = residual + branch.
        branch_norm: RMS-normalise the branch before it is gated (Mochi).
        rounding: "fp32_once" computes in float32 and rounds each output once (h before its statistics are taken);
            "eager" rounds to the activations' dtype after every operation, as PyTorch in bf16 does.
    """

    norm: Norm | None
    residual: bool = False
    gate: Activation | None = None
    branch_norm: bool = False
    rounding: Rounding = "fp32_once"


@dataclass(frozen=True)
class RowMap:
    """Which of G groups a row belongs to, hence which row of gate, scale and shift applies to it.

    ``group(row) = row // rows_per_group`` without an index, ``index[row // rows_per_group]`` with one. Per sample:
    rows_per_group = S; per frame: the tokens of a frame; per token: 1; segments and repeated timesteps: an index.

    Attributes:
        groups: G.
        rows_per_group: Consecutive rows that share an entry, at least 1; N is a multiple of it.
        index: (N / rows_per_group,) int32, each in [0, G), in any order; or None.
    """

    groups: int
    rows_per_group: int
    index: Tensor | None = None


@dataclass(frozen=True)
class Operand:
    """One of gate, scale and shift: ``values[group] + table``, added in registers, so that no sum is materialised.

    Attributes:
        values: (G, D) of any floating dtype, last dimension contiguous, rows at any stride.
        table: (D,) of any floating dtype, or None.
    """

    values: Tensor
    table: Tensor | None = None
