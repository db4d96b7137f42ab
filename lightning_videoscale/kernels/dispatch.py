"""What stands between the row ops and their backends.

(B, S, D) becomes rows and comes back; gradients come in their parameters' shape and dtype; what a variant lacks becomes
an empty tensor, since an op returns the same number of tensors always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.backend import choose_backend
from lightning_videoscale.kernels.modulation import as_rows, operand, row_map
from lightning_videoscale.kernels.rows import Operand, RowGradients, RowOp, RowOutputs

NAMESPACE = "lightning_videoscale"


@dataclass(slots=True)
class Operands:
    """The values and tables of an operation's gate, scale and shift, as it was called, and its index."""

    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    gate_table: Tensor | None = None
    scale_table: Tensor | None = None
    shift_table: Tensor | None = None
    index: Tensor | None = None

    @property
    def any_values(self) -> Tensor | None:
        """Any of gate, scale and shift: their map is the same."""
        return self.gate if self.gate is not None else self.scale


def run_forward(
    operation: str,
    backend: str,
    op: RowOp,
    x: Tensor,
    branch: Tensor | None,
    operands: Operands,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> RowOutputs:
    """Runs the backend's forward on x, the residual where there is a branch; x, branch, h and y are (B, S, D)."""
    if not x.numel():
        return _empty_outputs(op, x)
    rows, flat_x = row_map(x, operands.any_values, operands.index), as_rows(x)
    flat_branch = None if branch is None else as_rows(branch)
    gate, scale, shift = _flat_operands(operands)
    given = tuple(o for o in (gate, scale, shift) if o is not None)
    run = choose_backend(backend, operation, op, flat_x, flat_branch, given, rows).forward
    h, y, mean, rstd = run(
        op, flat_x, flat_branch, gate, scale, shift, _contiguous(weight), _contiguous(bias), rows, eps
    )
    h, y = (None if out is None else torch.ops.aten._unsafe_view.default(out, x.shape) for out in (h, y))
    return RowOutputs(h, y, mean, rstd)  # no views, which autograd would not let anybody write into


def run_backward(
    operation: str,
    backend: str,
    op: RowOp,
    dh: Tensor | None,
    dy: Tensor | None,
    h: Tensor,
    branch: Tensor | None,
    operands: Operands,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> RowGradients:
    """Runs the backend's backward; dx and dbranch come back as (B, S, D), the rest in the shape of its parameter.

    The gradients of gate, scale, shift and their tables have their parameter's dtype, as have those of weight and bias;
    that of the branch's bias is wide.
    """
    if not h.numel():
        return _zero_gradients(h, branch, operands, weight, bias)
    rows, flat_h = row_map(h, operands.any_values, operands.index), as_rows(h)
    flat_branch, flat_dh, flat_dy = (None if t is None else as_rows(t) for t in (branch, dh, dy))
    gate, scale, _ = _flat_operands(operands)
    given = tuple(o for o in (gate, scale) if o is not None)
    run = choose_backend(backend, operation, op, flat_h, flat_branch, given, rows).backward
    raw = run(
        op, flat_dh, flat_dy, flat_h, flat_branch, gate, scale, _contiguous(weight), _contiguous(bias), mean, rstd,
        rows, eps,
    )  # fmt: skip
    return RowGradients(
        None if raw.dx is None else raw.dx.view(h.shape),
        None if raw.dbranch is None else raw.dbranch.view(h.shape),
        _like(raw.dgate, operands.gate),
        _like(raw.dscale, operands.scale),
        _like(raw.dshift, operands.scale),
        _like(raw.dweight, weight),
        _like(raw.dbias, bias),
        _table_gradient(raw.dgate_table, raw.dgate, operands.gate_table),
        _table_gradient(raw.dscale_table, raw.dscale, operands.scale_table),
        _table_gradient(raw.dshift_table, raw.dshift, operands.shift_table),
        raw.dbranch_bias,
    )


def empty(like: Tensor) -> Tensor:
    """Stands for an output that the variant lacks."""
    return like.new_empty(0)


def if_needed(gradient: Tensor | None, needed: bool, like: Tensor) -> Tensor:
    """Returns a gradient as an op's output."""
    if not needed:
        return empty(like)
    assert gradient is not None
    return gradient


def bias_gradient(total: Tensor | None, dtype: torch.dtype | None, like: Tensor) -> Tensor:
    """Returns a bias's gradient, the sum over all rows, as an op's output, in the bias's dtype; None: not needed."""
    return empty(like) if total is None or dtype is None else total.to(dtype)


def fake_bias_gradient(channels: int, dtype: torch.dtype | None, like: Tensor) -> Tensor:
    """Returns the shape of what `bias_gradient` returns."""
    return empty(like) if dtype is None else like.new_empty(channels, dtype=dtype)


def fake_gradient(parameter: Tensor | None, needed: bool, like: Tensor) -> Tensor:
    """Returns the shape of what `if_needed` returns."""
    if not needed:
        return empty(like)
    assert parameter is not None
    return parameter.new_empty(parameter.shape)


def none_where_unneeded(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Undoes `if_needed`."""
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))


def register_autograd(
    name: str, differentiate: Callable[..., Any], save_for_backward: Callable[..., None]
) -> Callable[..., Any]:
    """Makes an op differentiable, as `torch.library.register_autograd` does at 40 µs less per call.

    That one reads the schema for default values every time; the schema of ``name`` must have none.

    Args:
        name: Of an op that is defined already, such as "lightning_videoscale::norm_modulate".
        differentiate: Called with the context and the gradient of every output; returns one per input.
        save_for_backward: Called with the context, the inputs and the output.

    Returns:
        The op.
    """
    namespace, short = name.split("::")
    op: Callable[..., Any] = getattr(getattr(torch.ops, namespace), short).default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = below_autograd(*inputs)
            save_for_backward(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return differentiate(ctx, *gradients)

    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def autograd(*inputs: Any) -> Any:
        needed = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return Differentiable.apply(*inputs) if needed else below_autograd(*inputs)  # type: ignore[no-untyped-call]

    torch.library.impl(name, "Autograd", autograd)
    return op


def refuse_second_derivative(name: str, operation: str) -> Callable[..., Any]:
    """Makes the gradient of an op that computes ``operation``'s gradient an error; returns the op."""

    def refuse(ctx: object, *gradients: Tensor) -> None:
        raise NotImplementedError(
            f"{operation} has no second derivative. If you need one (a gradient penalty, for example), leave this "
            "model without fused kernels."
        )

    return register_autograd(name, refuse, lambda ctx, inputs, output: None)


def _flat_operands(operands: Operands) -> tuple[Operand | None, Operand | None, Operand | None]:
    return (
        operand(operands.gate, operands.gate_table),
        operand(operands.scale, operands.scale_table),
        operand(operands.shift, operands.shift_table),
    )


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if gradient is None or parameter is None:
        return None
    return gradient.to(parameter.dtype).view(parameter.shape)


def _table_gradient(total: Tensor | None, by_group: Tensor | None, table: Tensor | None) -> Tensor | None:
    if table is None or (total is None and by_group is None):
        return None
    if total is None:
        assert by_group is not None
        total = by_group.sum(dim=0)
    return total.to(table.dtype)


def _empty_outputs(op: RowOp, x: Tensor) -> RowOutputs:
    statistics = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32)) if op.norm else None
    return RowOutputs(
        torch.empty_like(x, memory_format=torch.contiguous_format) if op.residual else None,
        torch.empty_like(x, memory_format=torch.contiguous_format) if op.norm else None,
        statistics if op.norm == "layer" else None,
        statistics,
    )


def _zero_gradients(
    h: Tensor, branch: Tensor | None, operands: Operands, weight: Tensor | None, bias: Tensor | None
) -> RowGradients:
    def zeros(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.new_zeros(parameter.shape)

    return RowGradients(
        dx=zeros(h),
        dbranch=zeros(branch),
        dgate=zeros(operands.gate),
        dscale=zeros(operands.scale),
        dshift=zeros(operands.scale),
        dweight=zeros(weight),
        dbias=zeros(bias),
        dgate_table=zeros(operands.gate_table),
        dscale_table=zeros(operands.scale_table),
        dshift_table=zeros(operands.shift_table),
        dbranch_bias=h.new_zeros(h.shape[-1], dtype=torch.promote_types(h.dtype, torch.float32)),
    )
