"""The row operations on CUDA: sources, see ``csrc/rows_*.cuh``; interface, see `RowBackend`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda.launch import address_of, rows_at
from lightning_videoscale.kernels.cuda.row_kernels import RowKernels, device_tuning, too_wide
from lightning_videoscale.kernels.cuda.row_variant import TYPES, Direction
from lightning_videoscale.kernels.row_types import Operand, RowGradients, RowInputs, RowMap, RowOutputs, RowVariant

_FINALIZE_COLUMNS, _FINALIZE_BLOCK, _MAX_GRID_Y = 16, (4, 64, 1), 65535
_GROUPS_IN_A_ROW, _SHARES = 16, 64
"""Up to how many groups one block adds up one after the other, and into how many shares it divides more of them."""


def limit(variant: RowVariant, device: int) -> str | None:
    """Returns why CUDA cannot run this, forward or backward, or None if it can."""
    if variant.activation not in TYPES or variant.branch not in (None, variant.activation):
        dtypes = [dtype for dtype in (variant.activation, variant.branch) if dtype is not None]
        return f"activations must have one dtype out of {[*TYPES]}; got {dtypes}"
    if variant.channels % 8:
        return f"D must be a multiple of 8; got {variant.channels}"
    parameters = {variant.modulation, variant.table, variant.affine} - {None}
    if not parameters <= set(TYPES):
        return f"gate, scale, shift, weight and bias must be of {[*TYPES]}; got {parameters}"
    widest = variant._replace(shift=variant.scale, has_dh=True)  # so that it is the same for both
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        if device_tuning(widest, direction, device) is None:
            return too_wide(widest, direction)
    return None


_kernels = functools.cache(RowKernels)


def forward(variant: RowVariant, inputs: RowInputs) -> RowOutputs:
    """Computes h, y and the statistics; see `RowBackend`."""
    return run_forward(_kernels(variant, "forward", inputs.x.get_device()), variant, inputs)


def run_forward(kernels: RowKernels, variant: RowVariant, inputs: RowInputs) -> RowOutputs:
    """Runs `forward` by these kernels."""
    op, (x, branch, gate, scale, shift, weight, bias, rows, eps, *_) = variant.op, inputs
    n, d = x.shape
    gate, scale, shift = _aligned(gate), _aligned(scale), _aligned(shift)
    weight, bias = _at_16_bytes(weight), _at_16_bytes(bias)
    h = x.new_empty((n, d)) if op.residual else None
    y = x.new_empty((n, d)) if op.norm else None
    mean = x.new_empty(n, dtype=torch.float32) if op.norm == "layer" else None
    rstd = x.new_empty(n, dtype=torch.float32) if op.norm else None
    order = _order(rows)
    blocks, run, _ = kernels.shape(n, rows)
    kernels.kernel(
        (blocks, 1, 1),
        kernels.block,
        *rows_at(x),
        *rows_at(branch),
        *_view(gate),
        *_view(scale),
        *_view(shift),
        address_of(weight),
        address_of(bias),
        address_of(h),
        address_of(y),
        address_of(mean),
        address_of(rstd),
        *_order_arguments(order, n, rows, run),
        eps,
    )
    return RowOutputs(h, y, mean, rstd)


def backward(variant: RowVariant, inputs: RowInputs, dh: Tensor | None, dy: Tensor | None) -> RowGradients:
    """Computes the gradients; see `RowBackend`."""
    return run_backward(_kernels(variant, "backward", inputs.x.get_device()), variant, inputs, dh, dy)


def run_backward(
    kernels: RowKernels, variant: RowVariant, inputs: RowInputs, dh: Tensor | None, dy: Tensor | None
) -> RowGradients:
    """Runs `backward` by these kernels."""
    op, per_row, (h, branch, gate, scale, _, weight, bias, rows, eps, mean, rstd) = variant.op, variant.per_row, inputs
    n, d = h.shape
    gate, scale = _aligned(gate), _aligned(scale)
    weight, bias = _at_16_bytes(weight), _at_16_bytes(bias)
    dx = h.new_empty((n, d)) if op.norm else None
    dbranch = h.new_empty((n, d)) if branch is not None else None
    # Per row, the operands' own gradients; else those are what the finalize makes of the parts.
    of_rows = tuple(_gradients_of_rows(o, per_row and op.sums, n, d) for o in (gate, scale, scale))
    groups = 1 if per_row else rows.groups
    blocks, run, cluster = kernels.shape(n, rows)
    parts = h.new_empty((blocks // cluster + groups, kernels.sums, d), dtype=torch.float32) if kernels.sums else None
    order = _order(rows)
    order_arguments = _order_arguments(order, n, rows, run)
    kernels.kernel(
        (blocks, 1, 1),
        kernels.block,
        *rows_at(dy),
        *rows_at(h),
        *rows_at(dh),
        *rows_at(branch),
        *_view(gate),
        *_view(scale),
        address_of(weight),
        address_of(bias),
        address_of(mean),
        address_of(rstd),
        address_of(dx),
        address_of(dbranch),
        *map(address_of, of_rows),
        address_of(parts),
        *order_arguments,
        eps,
        cluster=cluster,
    )
    if kernels.finalize is None:
        dgate, dscale, dshift = of_rows
        return RowGradients(dx, dbranch, dgate, dscale, dshift, None, None)
    own = kernels.sums_operands
    dgate, dscale, dshift = (
        h.new_empty((groups, d), dtype=torch.float32) if operand and own else None for operand in (gate, scale, scale)
    )
    wanted = (weight is not None and own, bias is not None and own, op.branch_sum)
    shares = _shares(groups) if any(wanted) else min(groups, _MAX_GRID_Y)
    dweight, dbias, dbranch_bias = (h.new_empty((shares, d), dtype=torch.float32) if w else None for w in wanted)
    kernels.finalize(
        (-(-d // _FINALIZE_COLUMNS), shares, 1),
        _FINALIZE_BLOCK,
        address_of(parts),
        *_view(gate),
        *_view(scale),
        address_of(weight),
        address_of(bias),
        address_of(dgate),
        address_of(dscale),
        address_of(dshift),
        address_of(dweight),
        address_of(dbias),
        address_of(dbranch_bias),
        *order_arguments,
        blocks // cluster,
    )
    dweight, dbias, dbranch_bias = map(_total, (dweight, dbias, dbranch_bias))
    sums = RowGradients(dx, dbranch, dgate, dscale, dshift, dweight, dbias, dbranch_bias=dbranch_bias)
    return _as_table_gradients(sums, of_rows) if per_row else sums


def _shares(groups: int) -> int:
    return 1 if groups <= _GROUPS_IN_A_ROW else min(groups, _SHARES)


def _total(of_shares: Tensor | None) -> Tensor | None:
    if of_shares is None:
        return None
    return of_shares[0] if len(of_shares) == 1 else of_shares.sum(0)


def _as_table_gradients(sums: RowGradients, of_rows: tuple[Tensor | None, ...]) -> RowGradients:
    """Gradients of a map per row: the operands' own are ``of_rows``, and the sums over all rows are the tables'."""
    dgate, dscale, dshift = of_rows
    gate_table, scale_table, shift_table = (
        None if total is None else total.squeeze(0) for total in (sums.dgate, sums.dscale, sums.dshift)
    )
    own = sums._replace(dgate=dgate, dscale=dscale, dshift=dshift)
    return own._replace(dgate_table=gate_table, dscale_table=scale_table, dshift_table=shift_table)


def _gradients_of_rows(operand: Operand | None, wanted: bool, n: int, d: int) -> Tensor | None:
    return operand.values.new_empty((n, d)) if operand is not None and wanted else None


def _aligned(operand: Operand | None) -> Operand | None:
    """An operand whose rows and table begin on 16 bytes, as the kernels read them."""
    if operand is None:
        return None
    values, table = operand.values, _at_16_bytes(operand.table)
    apart = values.stride(0) * values.element_size()
    if values.data_ptr() % 16 or apart % 16 or values.stride(1) != 1:
        values = values.clone(memory_format=torch.contiguous_format)
    return operand if values is operand.values and table is operand.table else Operand(values, table)


def _at_16_bytes(vector: Tensor | None) -> Tensor | None:
    return vector.clone() if vector is not None and vector.data_ptr() % 16 else vector


def _order(rows: RowMap) -> tuple[Tensor, Tensor] | None:
    """Entries in the order of their group, and where each group begins; None where they are in that order already."""
    if rows.index is None:
        return None
    groups, order = rows.index.sort(stable=True)
    bounds = torch.arange(rows.groups + 1, device=groups.device, dtype=groups.dtype)
    return order.to(torch.int32), torch.searchsorted(groups, bounds, out_int32=True)


def _order_arguments(order: tuple[Tensor, Tensor] | None, n: int, rows: RowMap, run: int) -> tuple[int, ...]:
    addresses = (0, 0) if order is None else (order[0].data_ptr(), order[1].data_ptr())
    return (*addresses, n, rows.rows_per_group, rows.groups, run)


def _view(operand: Operand | None) -> tuple[int, int, int]:
    if operand is None:
        return 0, 0, 0
    return operand.values.data_ptr(), address_of(operand.table), operand.values.stride(0)
