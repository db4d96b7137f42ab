"""What stands between the row ops and their backends.

(B, S, D) becomes rows and comes back; gradients come in their parameters' shape and dtype; what a variant lacks becomes
an empty tensor, since an op returns the same number of tensors always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.backend import choose_backend
from lightning_videoscale.kernels.modulation import as_rows, gradient_rows, operand, row_map
from lightning_videoscale.kernels.row_types import Operand, RowGradients, RowOp, RowOutputs

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
    weight, bias = contiguous(weight), contiguous(bias)
    run = choose_backend(
        backend, operation, op, flat_x, flat_branch, _given(gate, scale, shift), _given(weight, bias), rows
    ).forward
    h, y, mean, rstd = run(op, flat_x, flat_branch, gate, scale, shift, weight, bias, rows, eps)
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
    that of the branch's bias is wide. h stands for the stream whose dtype forward had: a variant without a norm, which
    does not keep it, gives dh in its place.
    """
    if not h.numel():
        return _zero_gradients(h, branch, operands, weight, bias)
    if operands.shift_table is not None:
        op = op._replace(shift_table=True)
    rows, flat_h = row_map(h, operands.any_values, operands.index), as_rows(h)
    flat_dh, flat_dy = (flat_h if t is h else gradient_rows(t, flat_h) for t in (dh, dy))
    flat_branch = None if branch is None else as_rows(branch)
    (gate, scale, _), (weight, bias) = _flat_operands(operands), (contiguous(weight), contiguous(bias))
    run = choose_backend(
        backend, operation, op, flat_h, flat_branch, _given(gate, scale), _given(weight, bias), rows
    ).backward
    raw = run(op, flat_dh, flat_dy, flat_h, flat_branch, gate, scale, weight, bias, mean, rstd, rows, eps)
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


def stand_in(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands for a branch whose values backward does not use, only its shape and dtype."""
    return like if like.dtype is dtype else like.new_zeros(like.shape[-1], dtype=dtype).expand(like.shape)


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


def _flat_operands(operands: Operands) -> tuple[Operand | None, Operand | None, Operand | None]:
    return (
        operand(operands.gate, operands.gate_table),
        operand(operands.scale, operands.scale_table),
        operand(operands.shift, operands.shift_table),
    )


def _given(*parameters: Any) -> tuple[Any, ...]:
    return tuple(p for p in parameters if p is not None)


def contiguous(parameter: Tensor | None) -> Tensor | None:
    """Returns a parameter whose values lie in a row, as backends read them."""
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
