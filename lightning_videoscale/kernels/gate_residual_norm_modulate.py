"""Gated residual, norm and modulation in one op: h = residual + act(gate) · branch, y = norm(h) · (1 + scale) + shift.

Inside: `gate_residual_norm_modulate` (what one calls), the op ``lightning_videoscale::gate_residual_norm_modulate`` and
its backward, an op of its own. Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.autograd import refuse_second_derivative, register_autograd
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.modulation import check_branch, check_modulation
from lightning_videoscale.kernels.norm_modulate import check_norm, fake_statistics
from lightning_videoscale.kernels.row_ops import (
    NAMESPACE,
    Operands,
    bias_gradient,
    empty,
    fake_bias_gradient,
    fake_gradient,
    if_needed,
    none_where_unneeded,
    run_backward,
    run_forward,
    stand_in,
)
from lightning_videoscale.kernels.row_types import ACTIVATIONS, ROUNDINGS, Activation, Norm, Rounding, RowOp

_FORWARD = f"{NAMESPACE}::gate_residual_norm_modulate"
_BACKWARD = f"{NAMESPACE}::gate_residual_norm_modulate_backward"


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
    h, y, _, _ = _op(
        residual, branch, *values, weight, bias, *tables, branch_bias, index, eps, norm, gate_activation, branch_norm,
        rounding, backend,
    )  # fmt: skip
    return h, y


def _forward(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate_table: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    branch_bias: Tensor | None,
    index: Tensor | None,
    eps: float,
    norm: Norm,
    activation: Activation,
    branch_norm: bool,
    rounding: Rounding,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = RowOp(norm, True, None if gate is None else activation, branch_norm, rounding)
    operands = Operands(gate, scale, shift, gate_table, scale_table, shift_table, index)
    h, y, mean, rstd = run_forward(
        "gate_residual_norm_modulate", backend, op, residual, branch, operands, weight, bias, eps
    )
    assert h is not None and y is not None and rstd is not None
    return h, y, empty(rstd) if mean is None else mean, rstd


def _forward_fake(residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, norm, _, _, _, _ = arguments
    h = residual.new_empty(residual.shape)
    return h, torch.empty_like(h), *fake_statistics(residual, norm)


def _backward(
    dh: Tensor | None,
    dy: Tensor,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate_table: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    index: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    norm: Norm,
    activation: Activation,
    branch_norm: bool,
    backend: str,
    needs: list[bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    gate_op, branch_sum = None if gate is None else activation, bias_dtype is not None
    op = RowOp(norm, True, gate_op, branch_norm, sums=any(needs), branch_sum=branch_sum)
    operands = Operands(gate, scale, None, gate_table, scale_table, shift_table, index)
    gradients = run_backward(
        "gate_residual_norm_modulate", backend, op, dh, dy, h, branch, operands, weight, bias,
        mean if norm == "layer" else None, rstd, eps,
    )  # fmt: skip
    assert gradients.dx is not None
    dbranch = if_needed(gradients.dbranch, branch is not None, h)
    of_parameters = (if_needed(g, n, rstd) for g, n in zip(gradients[2:10], needs, strict=True))
    return gradients.dx, dbranch, *of_parameters, bias_gradient(gradients.dbranch_bias, bias_dtype, rstd)


def _backward_fake(
    dh: Tensor | None,
    dy: Tensor,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate_table: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    index: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    norm: Norm,
    activation: Activation,
    branch_norm: bool,
    backend: str,
    needs: list[bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    parameters = (gate, scale, scale, weight, bias, gate_table, scale_table, shift_table)
    dbranch = fake_gradient(branch, branch is not None, h)
    of_parameters = (fake_gradient(p, n, rstd) for p, n in zip(parameters, needs, strict=True))
    return h.new_empty(h.shape), dbranch, *of_parameters, fake_bias_gradient(h.shape[-1], bias_dtype, rstd)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, branch, gate, scale, _, weight, bias, *tables, branch_bias, index = inputs[:12]
    eps, norm, activation, branch_norm, _, backend = inputs[12:]
    h, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    needs_gate = ctx.needs_input_grad[2] or ctx.needs_input_grad[7]
    kept_branch = branch if gate is not None and (branch_norm or needs_gate) else None
    ctx.save_for_backward(h, kept_branch, gate, scale, weight, bias, *tables, index, mean, rstd)
    ctx.settings, ctx.branch_dtype = (eps, norm, activation, branch_norm, backend), branch.dtype
    ctx.bias_dtype = branch_bias.dtype if ctx.needs_input_grad[10] else None


def _differentiate(
    ctx: Any, dh: Tensor | None, dy: Tensor | None, dmean: None, drstd: None
) -> tuple[Tensor | None, ...]:
    needs_residual, needs_branch, *needs, needs_bias = ctx.needs_input_grad[:11]
    h, branch, gate, *rest = ctx.saved_tensors
    if branch is None and (gate is not None or ctx.branch_dtype is not h.dtype):  # only a gate uses its values
        branch = stand_in(h, ctx.branch_dtype)
    saved = h, branch, gate, *rest
    dbranch, dresidual = None, dh
    gradients: Sequence[Tensor | None] = (None,) * 9
    if dy is not None:
        dresidual, dbranch, *gradients = _backward_op(dh, dy, *saved, *ctx.settings, needs, ctx.bias_dtype)
        dbranch = dresidual if branch is None else dbranch
    elif dh is not None and gate is not None:
        dbranch, *gradients = _gradients_without_norm(dh, saved, ctx.settings, needs, ctx.bias_dtype)
    elif dh is not None:
        dbranch = dh.to(ctx.branch_dtype)
        if needs_bias:
            total = dh.sum(dim=(0, 1), dtype=torch.promote_types(dh.dtype, torch.float32))
            gradients = (*(None,) * 8, total.to(ctx.bias_dtype))
    gradients = none_where_unneeded(gradients, (*needs, needs_bias))
    return dresidual if needs_residual else None, dbranch if needs_branch else None, *gradients, *(None,) * 7


def _gradients_without_norm(
    dh: Tensor,
    saved: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    needs: list[bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """The branch's and the parameters' gradients where y is not used: those of `gate_residual`."""
    _, branch, gate, _, _, _, gate_table, _, _, index, _, _ = saved
    eps, _, activation, branch_norm, backend = settings
    dbranch, dgate, dgate_table, dbias = torch.ops.lightning_videoscale.gate_residual_backward(
        dh, branch, gate, gate_table, index, eps, activation, branch_norm, backend, [needs[0], needs[5]], bias_dtype
    )
    return dbranch, dgate, None, None, None, None, dgate_table, None, None, dbias


torch.library.define(
    _FORWARD,
    "(Tensor residual, Tensor branch, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias,"
    " Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? branch_bias, Tensor? index, float eps,"
    " str norm, str activation, bool branch_norm, str rounding, str backend)"
    " -> (Tensor h, Tensor y, Tensor mean, Tensor rstd)",
)
torch.library.define(
    _BACKWARD,
    "(Tensor? dh, Tensor dy, Tensor h, Tensor? branch, Tensor? gate, Tensor? scale, Tensor? weight, Tensor? bias,"
    " Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? index, Tensor mean, Tensor rstd, float eps,"
    " str norm, str activation, bool branch_norm, str backend, bool[] needs, ScalarType? bias_dtype)"
    " -> (Tensor dresidual, Tensor dbranch, Tensor dgate, Tensor dscale, Tensor dshift, Tensor dweight, Tensor dbias,"
    " Tensor dgate_table, Tensor dscale_table, Tensor dshift_table, Tensor dbranch_bias)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)
torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
_op = register_autograd(_FORWARD, _differentiate, _save_for_backward)
_backward_op = refuse_second_derivative(_BACKWARD, "gate_residual_norm_modulate")
