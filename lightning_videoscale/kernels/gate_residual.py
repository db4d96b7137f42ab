"""Gated residual in one op: h = residual + act(gate) · branch.

Inside: `gate_residual` (what one calls), the op ``lightning_videoscale::gate_residual`` and its backward, an op of its
own. Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.autograd import refuse_second_derivative, register_autograd
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.modulation import check_branch, check_modulation
from lightning_videoscale.kernels.row_ops import (
    NAMESPACE,
    Operands,
    bias_gradient,
    fake_bias_gradient,
    fake_gradient,
    if_needed,
    none_where_unneeded,
    run_backward,
    run_forward,
    stand_in,
)
from lightning_videoscale.kernels.row_types import ACTIVATIONS, ROUNDINGS, Activation, Rounding, RowOp

_FORWARD = f"{NAMESPACE}::gate_residual"
_BACKWARD = f"{NAMESPACE}::gate_residual_backward"


def gate_residual(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor,
    *,
    gate_table: Tensor | None = None,
    branch_bias: Tensor | None = None,
    index: Tensor | None = None,
    gate_activation: Activation = "identity",
    branch_norm: bool = False,
    eps: float = 1e-6,
    rounding: Rounding = "fp32_once",
    backend: BackendName = "auto",
) -> Tensor:
    """Adds a gated branch to the residual stream: ``residual + act(gate + gate_table) * branch``.

    With "fp32_once" and a float32 gate it equals Wan's ``(residual.float() + branch * gate).type_as(residual)``. Keeps
    nothing for backward beside its inputs, of which the residual is not needed, nor the branch where gate and table are
    frozen. Differentiable once. Autocast leaves it as it is: h has the residual's dtype.

    Args:
        residual: (B, S, D), any floating dtype.
        branch: Of the same shape; another dtype, such as a Linear's under autocast, is allowed.
        gate: (B, R, D) with R dividing S, or with an index (G, D), as scale in `norm_modulate`.
        gate_table: (D,), added to every entry of ``gate`` inside; any dtype.
        branch_bias: (D,), any floating dtype: the bias of the Linear that the branch comes from, added there already
            and detached, as in ``branch = F.linear(x, weight, branch_bias.detach())``. It is not added here and its
            values are not read; its gradient, the sum of the branch's over all rows, is taken here from what is not
            rounded yet, in a fixed order, instead of in a pass of its own over what is. Without the ``detach`` it would
            be counted twice. A frozen bias costs nothing.
        index: (B, R) integers in [0, G): which entry belongs to each S / R consecutive tokens.
        gate_activation: "identity" or "tanh".
        branch_norm: RMS-normalise the branch before it is gated, as Mochi does.
        eps: Added to the branch's mean square; used with ``branch_norm`` only.
        rounding: "fp32_once" or "eager", as in `norm_modulate`; Mochi is "eager".
        backend: "auto", or "cuda", "triton" or "reference", which then runs or raises.

    Returns:
        h, (B, S, D) in the residual's dtype, contiguous.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit, or a setting has no such value.
        NotImplementedError: If the backend asked for by name cannot run this.
    """
    check_tensors(residual=residual, branch=branch, gate=gate, gate_table=gate_table, branch_bias=branch_bias)
    check_choice("gate_activation", gate_activation, ACTIVATIONS)
    check_choice("rounding", rounding, ROUNDINGS)
    check_branch(residual, branch, branch_bias)
    check_modulation(residual, {"gate": gate}, {"gate": gate_table}, index)
    h: Tensor = _op(
        residual, branch, gate, gate_table, branch_bias, index, eps, gate_activation, branch_norm, rounding, backend
    )
    return h


def _forward(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor,
    gate_table: Tensor | None,
    branch_bias: Tensor | None,
    index: Tensor | None,
    eps: float,
    activation: Activation,
    branch_norm: bool,
    rounding: Rounding,
    backend: str,
) -> Tensor:
    op = RowOp(norm=None, residual=True, gate=activation, branch_norm=branch_norm, rounding=rounding)
    operands = Operands(gate=gate, gate_table=gate_table, index=index)
    h = run_forward("gate_residual", backend, op, residual, branch, operands, None, None, eps).h
    assert h is not None
    return h


def _forward_fake(residual: Tensor, *arguments: Any) -> Tensor:
    return residual.new_empty(residual.shape)


def _backward(
    dh: Tensor,
    branch: Tensor,
    gate: Tensor,
    gate_table: Tensor | None,
    index: Tensor | None,
    eps: float,
    activation: Activation,
    branch_norm: bool,
    backend: str,
    needs: list[bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    branch_sum = bias_dtype is not None
    op = RowOp(None, True, activation, branch_norm, sums=any(needs), branch_sum=branch_sum)
    operands = Operands(gate=gate, gate_table=gate_table, index=index)
    gradients = run_backward("gate_residual", backend, op, dh, None, dh, branch, operands, None, None, None, None, eps)
    assert gradients.dbranch is not None
    dgate = if_needed(gradients.dgate, needs[0], branch)
    dgate_table = if_needed(gradients.dgate_table, needs[1], branch)
    return gradients.dbranch, dgate, dgate_table, bias_gradient(gradients.dbranch_bias, bias_dtype, branch)


def _backward_fake(
    dh: Tensor,
    branch: Tensor,
    gate: Tensor,
    gate_table: Tensor | None,
    index: Tensor | None,
    eps: float,
    activation: Activation,
    branch_norm: bool,
    backend: str,
    needs: list[bool],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    dgate, dgate_table = fake_gradient(gate, needs[0], branch), fake_gradient(gate_table, needs[1], branch)
    return branch.new_empty(branch.shape), dgate, dgate_table, fake_bias_gradient(branch.shape[-1], bias_dtype, branch)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, branch, gate, gate_table, branch_bias, index, *settings, _, backend = inputs
    *_, branch_norm = settings
    kept_branch = branch if branch_norm or any(ctx.needs_input_grad[2:4]) else None
    ctx.save_for_backward(kept_branch, gate, gate_table, index)
    ctx.settings, ctx.branch_dtype = (*settings, backend), branch.dtype
    ctx.bias_dtype = branch_bias.dtype if ctx.needs_input_grad[4] else None


def _differentiate(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    needs_residual, needs_branch, *needs, needs_bias = ctx.needs_input_grad[:5]
    dbranch = dgate = dgate_table = dbias = None
    if needs_branch or needs_bias or any(needs):
        branch, *saved = ctx.saved_tensors
        if branch is None:  # only the gate's gradient has a use for its values
            branch = stand_in(dh, ctx.branch_dtype)
        dbranch, *gradients = _backward_op(dh, branch, *saved, *ctx.settings, needs, ctx.bias_dtype)
        dgate, dgate_table, dbias = none_where_unneeded(gradients, (*needs, needs_bias))
    return dh if needs_residual else None, dbranch if needs_branch else None, dgate, dgate_table, dbias, *(None,) * 6


torch.library.define(
    _FORWARD,
    "(Tensor residual, Tensor branch, Tensor gate, Tensor? gate_table, Tensor? branch_bias, Tensor? index, float eps,"
    " str activation, bool branch_norm, str rounding, str backend) -> Tensor",
)
torch.library.define(
    _BACKWARD,
    "(Tensor dh, Tensor branch, Tensor gate, Tensor? gate_table, Tensor? index, float eps, str activation,"
    " bool branch_norm, str backend, bool[] needs, ScalarType? bias_dtype)"
    " -> (Tensor dbranch, Tensor dgate, Tensor dgate_table, Tensor dbranch_bias)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)
torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
_op = register_autograd(_FORWARD, _differentiate, _save_for_backward)
_backward_op = refuse_second_derivative(_BACKWARD, "gate_residual")
