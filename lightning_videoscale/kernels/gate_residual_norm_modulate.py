"""Gated residual, norm and modulation in one op: h = residual + act(gate) · branch, y = norm(h) · (1 + scale) + shift.

Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from torch import Tensor

from lightning_videoscale.kernels import row_ops
from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.modulation import check_branch, check_modulation
from lightning_videoscale.kernels.norm_modulate import check_norm
from lightning_videoscale.kernels.row_types import ACTIVATIONS, ROUNDINGS, Activation, Norm, Rounding


def gate_residual_norm_modulate(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Norm = "layer",
    eps: float = 1e-6,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    branch_bias: Tensor | None = None,
    index: Tensor | None = None,
    gate_activation: Activation = "identity",
    branch_norm: bool = False,
    rounding: Rounding = "fp32_once",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Adds a gated branch to the residual stream and normalises the result for the next branch.

    The same as `gate_residual` followed by `norm_modulate`: h is rounded to the residual's dtype before its statistics
    are taken. For backward it keeps h and, for a gate that is trained, the branch, not the residual, and mean and rstd
    of h: 8 bytes per token, 4 for RMSNorm. Differentiable once. Autocast leaves it as it is: h and y have the
    residual's dtype.

    Args:
        residual: (B, S, D), any floating dtype.
        branch: Of the same shape; another dtype, such as a Linear's under autocast, is allowed.
        gate: As scale; None for ``h = residual + branch``.
        scale: (B, R, D) with R dividing S, or with an index (G, D), as in `norm_modulate`; or None. Gate, scale and
            shift have one shape and dtype.
        shift: As scale; or None.
        weight: (D,), the norm's own, or None.
        bias: (D,), as in `norm_modulate`.
        norm: "layer" or "rms".
        eps: Added to the variance, or to the mean square; of the branch too with ``branch_norm``.
        gate_table: (D,), added to every entry of ``gate`` inside, as the other tables; all of one dtype.
        scale_table: Likewise.
        shift_table: Likewise.
        branch_bias: (D,), the bias of the Linear that the branch comes from, added there already and detached, as in
            `gate_residual`: not read, its gradient is returned.
        index: (B, R) integers in [0, G): which entry belongs to each S / R consecutive tokens.
        gate_activation: "identity" or "tanh".
        branch_norm: RMS-normalise the branch before it is gated, as Mochi does.
        rounding: "fp32_once" or "eager", as in `norm_modulate`.
        backend: "auto", or "cuda", "triton" or "reference", which then runs or raises.

    Returns:
        h and y, both (B, S, D) in the residual's dtype, contiguous.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit, a norm's or operand's parts do not belong together, or a
            setting has no such value.
        NotImplementedError: If the backend asked for by name cannot run this.
    """
    check_tensors(
        residual=residual, branch=branch, gate=gate, scale=scale, shift=shift, weight=weight, bias=bias,
        gate_table=gate_table, scale_table=scale_table, shift_table=shift_table, branch_bias=branch_bias,
    )  # fmt: skip
    check_choice("gate_activation", gate_activation, ACTIVATIONS)
    check_choice("rounding", rounding, ROUNDINGS)
    check_branch(residual, branch, branch_bias)
    if gate is None and branch_norm:
        raise ValueError("branch_norm belongs to a gated branch; give a gate, or normalise the branch before.")
    values, tables = (gate, scale, shift), (gate_table, scale_table, shift_table)
    names = ("gate", "scale", "shift")
    check_modulation(residual, dict(zip(names, values, strict=True)), dict(zip(names, tables, strict=True)), index)
    check_norm(residual, norm, scale, shift, weight, bias)
    h, y, _, _ = row_ops.gate_residual_norm_modulate(
        residual, branch, *values, weight, bias, *tables, branch_bias, index, eps, norm, gate_activation, branch_norm,
        rounding, backend,
    )  # fmt: skip
    return h, y
