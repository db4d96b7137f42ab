"""The ``torch.library`` ops of the row operations, with autograd: `norm_modulate`, `gate_residual` and both in one.

They differ in whether there is a norm and whether there is a residual, hence one schema (`RowCall`) serves all three:
a call becomes rows (`RowInputs`) and a variant, the variant a backend, and its results what the op returns.
Backward is an op of its own (`RowBackwardCall`), which returns a list: the gradients that are needed and no others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.autograd import unsafe_view
from lightning_videoscale.kernels.autograd import NAMESPACE, define_op, refuse_second_derivative, register_autograd
from lightning_videoscale.kernels.backend import choose
from lightning_videoscale.kernels.modulation import as_rows, contiguous, gradient_rows, in_dtype, operand, row_map
from lightning_videoscale.kernels.row_types import (
    Activation,
    Norm,
    RowBackend,
    RowGradients,
    RowInputs,
    RowOp,
    RowOutputs,
    RowVariant,
    variant_of,
)


class RowCall(NamedTuple):
    """A call of a row operation, in the order of the ops' schema; tensors as `gate_residual_norm_modulate` has them."""

    x: Tensor
    branch: Tensor | None = None
    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate_table: Tensor | None = None
    scale_table: Tensor | None = None
    shift_table: Tensor | None = None
    branch_bias: Tensor | None = None
    row_index: Tensor | None = None
    eps: float = 1e-6
    norm: Norm | None = None
    gate_activation: Activation = "identity"
    branch_norm: bool = False
    rounding: str = "fp32_once"
    backend: str = "auto"


class RowBackwardCall(NamedTuple):
    """A call of a backward op; what is not described here is as in forward.

    Attributes:
        dh: Gradient of h, or of what else is made of x.
        dy: Gradient of y; None where there is no norm, or nobody uses y.
        h: What was normalised: h, or x without a residual. Without a norm, anything of its shape and dtype.
        branch: None where its gradient is that of the residual. Values count only where a gate is trained or the branch
            is normalised.
        mean: What forward kept; empty for "rms", None without a norm.
        rstd: What forward kept; None without a norm.
        norm: None where there is no dy.
        needs: Whether the gradient of each of the first eleven of `RowCall` is wanted.
        bias_dtype: Of the branch's bias; None if its gradient is not wanted.
    """

    dh: Tensor | None
    dy: Tensor | None
    h: Tensor
    branch: Tensor | None
    gate: Tensor | None
    scale: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gate_table: Tensor | None
    scale_table: Tensor | None
    shift_table: Tensor | None
    row_index: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    eps: float
    norm: Norm | None
    gate_activation: Activation
    branch_norm: bool
    backend: str
    needs: Sequence[bool]
    bias_dtype: torch.dtype | None


_DIFFERENTIABLE = RowCall._fields[:11]
_SCHEMA = (
    "(Tensor x, Tensor? branch, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias,"
    " Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? branch_bias, Tensor? index, float eps,"
    " str? norm, str gate_activation, bool branch_norm, str rounding, str backend)"
)
_BACKWARD_SCHEMA = (
    "(Tensor? dh, Tensor? dy, Tensor h, Tensor? branch, Tensor? gate, Tensor? scale, Tensor? weight, Tensor? bias,"
    " Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? index, Tensor? mean, Tensor? rstd,"
    " float eps, str? norm, str gate_activation, bool branch_norm, str backend, bool[] needs,"
    " ScalarType? bias_dtype) -> Tensor[]"
)


def _forward(operation: str, *arguments: Any) -> Any:
    call = RowCall(*arguments)
    x = call.x
    op = RowOp(
        call.norm,
        call.branch is not None,
        None if call.gate is None else call.gate_activation,
        call.branch_norm,
        call.rounding,  # type: ignore[arg-type]
    )
    if x.numel():
        values = call.gate if call.gate is not None else call.scale
        inputs = RowInputs(
            as_rows(x),
            None if call.branch is None else as_rows(call.branch),
            operand(call.gate, call.gate_table),
            operand(call.scale, call.scale_table),
            operand(call.shift, call.shift_table),
            contiguous(call.weight),
            contiguous(call.bias),
            row_map(x, values, call.row_index),
            call.eps,
        )
        variant = variant_of(op, inputs)
        outputs = _backend(operation, call.backend, variant, x).forward(variant, inputs)
    else:
        outputs = RowOutputs(x.new_empty(x.shape), x.new_empty(x.shape), *_statistics(call))
    h, y = (None if t is None else unsafe_view(t, x.shape) for t in outputs[:2])
    return _returned(call, h, y, outputs.mean, outputs.rstd)  # no views, which autograd would not let anybody write to


def _forward_fake(operation: str, *arguments: Any) -> Any:
    call = RowCall(*arguments)
    return _returned(call, call.x.new_empty(call.x.shape), call.x.new_empty(call.x.shape), *_statistics(call))


def _returned(call: RowCall, h: Tensor | None, y: Tensor | None, mean: Tensor | None, rstd: Tensor | None) -> Any:
    """What the op returns: h with a residual, y and the statistics with a norm, an empty mean for a RMSNorm."""
    if call.norm is None:
        return h
    assert rstd is not None
    of_norm = y, rstd.new_empty(0) if mean is None or call.norm == "rms" else mean, rstd
    return of_norm if call.branch is None else (h, *of_norm)


def _statistics(call: RowCall) -> tuple[Tensor, Tensor]:
    """Room for mean and rstd."""
    rows, wide = call.x.shape[0] * call.x.shape[1], torch.promote_types(call.x.dtype, torch.float32)
    return call.x.new_empty(rows, dtype=wide), call.x.new_empty(rows, dtype=wide)


def _backward(operation: str, *arguments: Any) -> list[Tensor]:
    """The gradients that are needed, in the order of `RowCall`; each in its parameter's shape and dtype."""
    call = RowBackwardCall(*arguments)
    h, branch, needs = call.h, call.branch, call.needs
    if not h.numel():
        return [t.zero_() for t in _backward_fake(operation, *arguments)]
    gate = None if call.gate is None else call.gate_activation
    residual = operation != "norm_modulate"
    op = RowOp(
        call.norm, residual, gate, call.branch_norm, sums=any(needs[2:10]), branch_sum=call.bias_dtype is not None
    )
    values = call.gate if call.gate is not None else call.scale
    flat_h = as_rows(h)
    inputs = RowInputs(
        flat_h,
        None if branch is None else as_rows(branch),
        operand(call.gate, call.gate_table),
        operand(call.scale, call.scale_table),
        None,
        contiguous(call.weight),
        contiguous(call.bias),
        row_map(h, values, call.row_index),
        call.eps,
        call.mean if call.norm == "layer" else None,
        call.rstd,
    )
    dh, dy = (flat_h if t is h else gradient_rows(t, flat_h) for t in (call.dh, call.dy))
    variant = variant_of(op, inputs, has_dh=dh is not None, shift_table=call.shift_table)
    found = _backend(operation, call.backend, variant, h).backward(variant, inputs, dh, dy)
    return [
        _as_parameter(found, name, call)
        for name, needed in zip(_DIFFERENTIABLE, needs, strict=True)
        if needed
    ]  # fmt: skip


def _as_parameter(found: RowGradients, name: str, call: RowBackwardCall) -> Tensor:
    gradient: Tensor | None = getattr(found, f"d{name}")
    if gradient is None and name.endswith("_table"):
        values: Tensor | None = getattr(found, f"d{name.removesuffix('_table')}")
        gradient = None if values is None else values.sum(dim=0)
    assert gradient is not None, f"{name} has no gradient here"
    if name == "branch_bias":
        assert call.bias_dtype is not None
        return in_dtype(gradient, call.bias_dtype)
    like = _parameter(call, name)
    gradient = in_dtype(gradient, like.dtype)
    return gradient if gradient.shape == like.shape else gradient.view(like.shape)


def _parameter(call: RowBackwardCall, name: str) -> Tensor:
    """What has the shape and the dtype of a gradient."""
    same = {"x": "h", "shift": "scale"}
    parameter: Tensor | None = getattr(call, same.get(name, name))
    assert parameter is not None, f"{name} has no gradient here"
    return parameter


def _backward_fake(operation: str, *arguments: Any) -> list[Tensor]:
    call = RowBackwardCall(*arguments)
    gradients = []
    for name, needed in zip(_DIFFERENTIABLE, call.needs, strict=True):
        if needed and name == "branch_bias":
            gradients.append(call.h.new_empty(call.h.shape[-1], dtype=call.bias_dtype))
        elif needed:
            like = _parameter(call, name)
            gradients.append(like.new_empty(like.shape))
    return gradients


def _backend(operation: str, backend: str, variant: RowVariant, x: Tensor) -> RowBackend:
    module: RowBackend = choose("rows", backend, operation, variant, x.get_device())
    return module


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    call = RowCall(*inputs)
    ctx.set_materialize_grads(False)
    h = mean = rstd = None
    if call.norm is not None:
        *_, mean, rstd = output
        h = call.x if call.branch is None else output[0]
        ctx.mark_non_differentiable(mean, rstd)
    _, _, needs_gate, _, _, _, _, needs_table, _, _, needs_bias, *_ = ctx.needs_input_grad
    values_used = call.gate is not None and (call.branch_norm or needs_gate or needs_table)
    ctx.save_for_backward(
        h, call.branch if values_used else None, call.gate, call.scale, call.weight, call.bias, call.gate_table,
        call.scale_table, call.shift_table, call.row_index, mean, rstd,
    )  # fmt: skip
    ctx.settings = call.eps, call.norm, call.gate_activation, call.branch_norm, call.backend
    ctx.branch_dtype = None if call.branch is None else call.branch.dtype
    ctx.bias_dtype = call.branch_bias.dtype if call.branch_bias is not None and needs_bias else None


def _differentiate(operation: str, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a call's arguments, one for each of `RowCall`."""
    dh, dy, *_ = (None, *gradients) if operation == "norm_modulate" else (*gradients, None)
    needs, branch_dtype = ctx.needs_input_grad, ctx.branch_dtype
    none = (None,) * (len(RowCall._fields) - len(_DIFFERENTIABLE))
    if dh is None and dy is None:
        return (None,) * len(RowCall._fields)
    h, branch, gate, scale, weight, bias, *tables, index, mean, rstd = ctx.saved_tensors
    eps, norm, activation, branch_norm, backend = ctx.settings
    wanted = list(needs[: len(_DIFFERENTIABLE)])
    if dy is None:  # y plays no part
        assert dh is not None
        operation, h, norm, scale, weight, bias, mean, rstd = "gate_residual", dh, None, None, None, None, None, None
        wanted = [*wanted[:3], *[False] * 4, wanted[7], False, False, wanted[10]]
        tables = [tables[0], None, None]
        if not any(wanted[1:]):
            return dh if wanted[0] else None, *(None,) * (len(RowCall._fields) - 1)
        if gate is None:
            return (*_of_a_sum(dh, branch_dtype, ctx.bias_dtype, wanted), *none)
    if branch is None and branch_dtype is not None and (gate is not None or branch_dtype is not h.dtype):
        branch = _stand_in(h, branch_dtype)  # only a trained gate uses its values
    needs_x, needs_branch, *_ = wanted
    wanted[0], wanted[1] = norm is not None, branch is not None
    found = iter(
        _BACKWARDS[operation](
            dh, dy, h, branch, gate, scale, weight, bias, *tables, index, mean, rstd, eps, norm, activation,
            branch_norm, backend, wanted, ctx.bias_dtype,
        )
    )  # fmt: skip
    dx, dbranch, *others = (next(found) if want else None for want in wanted)
    dx = dh if norm is None else dx
    dbranch = dx if branch is None else dbranch
    return dx if needs_x else None, dbranch if needs_branch else None, *others, *none


def _of_a_sum(
    dh: Tensor, branch_dtype: torch.dtype, bias_dtype: torch.dtype | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of residual + branch."""
    dbias = None
    if bias_dtype is not None:
        dbias = dh.sum(dim=(0, 1), dtype=torch.promote_types(dh.dtype, torch.float32)).to(bias_dtype)
    dbranch = dh.to(branch_dtype) if needs[1] else None
    return dh if needs[0] else None, dbranch, *(None,) * (len(_DIFFERENTIABLE) - 3), dbias


def _stand_in(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands for a branch whose values backward does not use, only its shape and dtype."""
    return like if like.dtype is dtype else like.new_zeros(like.shape[-1], dtype=dtype).expand(like.shape)


def _define(operation: str, outputs: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Defines an op and its backward; returns both."""
    name, backward = f"{NAMESPACE}::{operation}", f"{NAMESPACE}::{operation}_backward"
    of = functools.partial
    define_op(name, f"{_SCHEMA} -> {outputs}", of(_forward, operation), of(_forward_fake, operation))
    define_op(backward, _BACKWARD_SCHEMA, of(_backward, operation), of(_backward_fake, operation))
    op = register_autograd(name, functools.partial(_differentiate, operation), _save_for_backward)
    return op, refuse_second_derivative(backward, operation)


_BACKWARDS: dict[str, Callable[..., Any]] = {}
norm_modulate, _BACKWARDS["norm_modulate"] = _define("norm_modulate", "(Tensor y, Tensor mean, Tensor rstd)")
gate_residual, _BACKWARDS["gate_residual"] = _define("gate_residual", "Tensor")
gate_residual_norm_modulate, _BACKWARDS["gate_residual_norm_modulate"] = _define(
    "gate_residual_norm_modulate", "(Tensor h, Tensor y, Tensor mean, Tensor rstd)"
)
