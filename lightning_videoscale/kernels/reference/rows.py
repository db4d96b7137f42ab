"""The row operations in plain PyTorch: the oracle of the other backends, in float64 where the activations are that.

Rows are viewed as (E, T, D): E entries of the row map (frames, samples, tokens) of T consecutive rows each, so that an
operand is one (E, 1, D) tensor and nothing is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.kernels.row_types import (
    Operand,
    RowGradients,
    RowInputs,
    RowMap,
    RowOp,
    RowOutputs,
    RowVariant,
)


def limit(variant: RowVariant, device: int) -> str | None:
    """Returns None: the reference runs everything everywhere."""
    return None


def forward(variant: RowVariant, inputs: RowInputs) -> RowOutputs:
    """Computes ``h = x + act(gate) · branch`` and ``y = norm(h) · (1 + scale) + shift``, see `RowBackend`.

    Where the eager law rounds: table + values, act(gate), gate · branch and the sum with the residual; the norm (a
    RMSNorm before and after its weight; a branch's norm not before its gate, as Mochi has it), 1 + scale, the product.
    """
    op, (x, branch, gate, scale, shift, weight, bias, rows, eps, *_) = variant.op, inputs
    dtype, wide = x.dtype, wide_dtype(x)
    step = dtype if op.rounding == "eager" else wide
    x = _by_entry(x, rows).to(wide)
    h = None
    if branch is not None:
        h = x = _round(x + _round(_gated_branch(op, branch, gate, rows, eps, step, wide), step), dtype)
    if op.norm is None:
        return RowOutputs(_flat(h, dtype), None, None, None)
    if op.norm == "layer":
        wide_weight, wide_bias = (None if p is None else p.to(wide) for p in (weight, bias))
        normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], wide_weight, wide_bias, eps)
        y = _round(normed, step)
    else:
        mean, rstd = None, _inverse_rms(x, eps)
        y = _round(x * rstd, step)
        y = y if weight is None else _round(y * weight.to(wide), step)
    if scale is not None:
        y = _round(y * _round(1 + _composed(scale, rows, step, wide), step), step)
    if shift is not None:
        y = y + _composed(shift, rows, step, wide)
    return RowOutputs(_flat(h, dtype), _flat(y, dtype), None if mean is None else mean.flatten(), rstd.flatten())


def backward(variant: RowVariant, inputs: RowInputs, dh: Tensor | None, dy: Tensor | None) -> RowGradients:
    """Computes all gradients wide, from the stored h and statistics, and rounds once; see `RowBackend`."""
    op, (h, branch, gate, scale, _, weight, bias, rows, eps, mean, rstd) = variant.op, inputs
    wide = wide_dtype(h)
    dx = None if dh is None else _by_entry(dh, rows).to(wide)
    dscale = dshift = dweight = dbias = None
    if dy is not None:
        assert rstd is not None
        dy, centred = _by_entry(dy, rows).to(wide), _by_entry(h, rows).to(wide)
        rstd = _by_entry(rstd.unsqueeze(-1), rows)
        x_hat = (centred if mean is None else centred - _by_entry(mean.unsqueeze(-1), rows)) * rstd
        normed = x_hat if weight is None else x_hat * weight.to(wide)
        normed = normed if bias is None else normed + bias.to(wide)
        if scale is not None:
            dshift, dscale = _sum_groups(dy, rows), _sum_groups(dy * normed, rows)
        dnormed = dy if scale is None else dy * (1 + _composed(scale, rows, wide, wide))
        dweight = None if weight is None else (dnormed * x_hat).sum(dim=(0, 1))
        dbias = None if bias is None else dnormed.sum(dim=(0, 1))
        dx_hat = dnormed if weight is None else dnormed * weight.to(wide)
        dnorm = dx_hat - x_hat * (dx_hat * x_hat).mean(dim=-1, keepdim=True)
        dnorm = rstd * (dnorm if mean is None else dnorm - dx_hat.mean(dim=-1, keepdim=True))
        dx = dnorm if dx is None else dx + dnorm
    dbranch, dgate = dx, None
    if branch is not None and dx is not None:
        dbranch, dgate = _branch_gradients(op, dx, branch, gate, rows, eps, wide)
    dbranch_bias = dbranch.sum(dim=(0, 1)) if op.branch_sum and dbranch is not None else None
    dbranch = None if branch is None else _flat(dbranch, branch.dtype)
    dx = None if op.norm is None else _flat(dx, h.dtype)
    return RowGradients(dx, dbranch, dgate, dscale, dshift, dweight, dbias, dbranch_bias=dbranch_bias)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype to compute in: float32, or x's where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _by_entry(x: Tensor, rows: RowMap) -> Tensor:
    """(N, D) as (E, T, D)."""
    return x.view(-1, rows.rows_per_group, x.shape[-1])


def _flat(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(E, T, D) as (N, D), contiguous and never a view of an argument."""
    return None if x is None else x.to(dtype, copy=True, memory_format=torch.contiguous_format).flatten(0, 1)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to ``dtype`` and goes on in x's own."""
    return x.to(dtype).to(x.dtype)


def _composed(operand: Operand, rows: RowMap, step: torch.dtype, wide: torch.dtype) -> Tensor:
    """Returns values + table of every entry, (E, 1, D)."""
    values = operand.values.to(wide)
    if operand.table is not None:
        values = values + operand.table.to(wide)
    values = _round(values, step)
    # Unlike values[index], this takes no entry from behind for a negative one.
    return (values if rows.index is None else values.index_select(0, rows.index)).unsqueeze(1)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _activated(op: RowOp, gate: Operand, rows: RowMap, step: torch.dtype, wide: torch.dtype) -> Tensor:
    gates = _composed(gate, rows, step, wide)
    return _round(gates.tanh(), step) if op.gate == "tanh" else gates


def _gated_branch(
    op: RowOp,
    branch: Tensor,
    gate: Operand | None,
    rows: RowMap,
    eps: float,
    step: torch.dtype,
    wide: torch.dtype,
) -> Tensor:
    branch = _by_entry(branch, rows).to(wide)
    if op.branch_norm:
        branch = branch * _inverse_rms(branch, eps)
    return branch if gate is None else branch * _activated(op, gate, rows, step, wide)


def _branch_gradients(
    op: RowOp, dh: Tensor, branch: Tensor, gate: Operand | None, rows: RowMap, eps: float, wide: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    branch, dgate, rstd = _by_entry(branch, rows).to(wide), None, None
    if op.branch_norm:
        rstd = _inverse_rms(branch, eps)
        branch = branch * rstd
    dbranch = dh
    if gate is not None:
        gates = _activated(op, gate, rows, wide, wide)
        dbranch = dh * gates
        dgate = _sum_groups(dh * branch * (1 - gates.square() if op.gate == "tanh" else 1), rows)
    if rstd is not None:
        dbranch = rstd * (dbranch - branch * (dbranch * branch).mean(dim=-1, keepdim=True))
    return dbranch, dgate


def _sum_groups(x: Tensor, rows: RowMap) -> Tensor:
    """Sums rows (E, T, D) of one group; (G, D)."""
    by_entry = x.sum(dim=1)
    if rows.index is None:
        return by_entry
    # Unlike index_add_, this adds in a fixed order on GPUs too.
    return by_entry.new_zeros(rows.groups, x.shape[-1]).index_put_((rows.index,), by_entry, accumulate=True)
