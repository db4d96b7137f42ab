"""The row operations on CUDA: sources, see ``csrc/rows_*.cuh``; interface, see `RowBackend`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.row_kernels import Plan, device_tuning, too_wide
from lightning_videoscale.kernels.cuda.row_variant import TYPES, Variant, variant_of
from lightning_videoscale.kernels.row_types import Operand, RowGradients, RowMap, RowOp, RowOutputs

_FINALIZE_COLUMNS, _FINALIZE_BLOCK, _MAX_GRID_Y = 16, (4, 64, 1), 65535


def objection(
    op: RowOp,
    x: Tensor,
    branch: Tensor | None,
    operands: tuple[Operand, ...],
    affine: tuple[Tensor, ...],
    rows: RowMap,
) -> str | None:
    """Returns why CUDA cannot run this, or None if it can."""
    if not x.is_cuda:
        return f"the tensors are on {x.device}"
    if x.dtype not in TYPES or (branch is not None and branch.dtype != x.dtype):
        dtypes = [t.dtype for t in (x, branch) if t is not None]
        return f"activations must have one dtype out of {[*TYPES]}; got {dtypes}"
    if x.shape[1] % 8:
        return f"D must be a multiple of 8; got {x.shape[1]}"
    parameters = [t for t in (*(t for operand in operands for t in operand), *affine) if t is not None]
    if any(t.dtype not in TYPES for t in parameters):
        return f"gate, scale, shift, weight and bias must be of {[*TYPES]}; got {[t.dtype for t in parameters]}"
    if x.shape[0] >= 2**31:
        return f"at most 2³¹ - 1 rows; got {x.shape[0]}"
    per_row = rows.index is None and rows.rows_per_group == 1
    widest = max((operand.values.dtype.itemsize for operand in operands), default=0) if per_row else 0
    return _device_objection(op, x.shape[1], x.dtype, widest, x.get_device())


@functools.cache
def _device_objection(op: RowOp, channels: int, dtype: torch.dtype, operand_bytes: int, device: int) -> str | None:
    """Returns why a device cannot run the widest variant of an operation, forward or backward."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"compute capability 8.0 or newer is needed; {torch.cuda.get_device_name(device)} is older"
    operand = {0: None, 2: torch.bfloat16, 4: torch.float32}[operand_bytes]
    scale = operand if op.norm else None
    gate = operand if op.gate else None
    variant = Variant(
        op, channels, dtype, gate, None, scale, None, scale, None, None, None, operand is not None, False, True
    )
    for direction in ("forward", "backward"):
        if device_tuning(variant, direction, device) is None:
            return too_wide(variant, direction)
    try:
        toolkit.driver()
        toolkit.nvrtc()
        toolkit.include_folder()
    except toolkit.CudaUnavailableError as error:
        return str(error)
    return None


_plan = functools.cache(Plan)


def forward(
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
    """Computes h, y and the statistics; see `RowBackend`."""
    variant = variant_of(op, x, gate, scale, shift, weight, bias, rows)
    plan = _plan(variant, "forward", x.get_device())
    return run_forward(plan, op, x, branch, gate, scale, shift, weight, bias, rows, eps)


def run_forward(
    plan: Plan,
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
    """Runs `forward` as a plan says."""
    n, d = x.shape
    gate, scale, shift = _aligned(gate), _aligned(scale), _aligned(shift)
    weight, bias = _at_16_bytes(weight), _at_16_bytes(bias)
    h = x.new_empty((n, d)) if op.residual else None
    y = x.new_empty((n, d)) if op.norm else None
    mean = x.new_empty(n, dtype=torch.float32) if op.norm == "layer" else None
    rstd = x.new_empty(n, dtype=torch.float32) if op.norm else None
    order = _order(rows)
    blocks, run, _ = plan.shape(n, rows)
    plan.kernel(
        (blocks, 1, 1),
        plan.block,
        *_source(x),
        *_source(branch),
        *_view(gate),
        *_view(scale),
        *_view(shift),
        _address(weight),
        _address(bias),
        _address(h),
        _address(y),
        _address(mean),
        _address(rstd),
        *_order_arguments(order, n, rows, run),
        eps,
    )
    return RowOutputs(h, y, mean, rstd)


def backward(
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
    """Computes the gradients; see `RowBackend`."""
    variant = variant_of(op, h, gate, scale, None, weight, bias, rows, has_dh=dh is not None)
    plan = _plan(variant, "backward", h.get_device())
    return run_backward(plan, op, dh, dy, h, branch, gate, scale, weight, bias, mean, rstd, rows, eps)


def run_backward(
    plan: Plan,
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
    """Runs `backward` as a plan says."""
    n, d = h.shape
    per_row = rows.index is None and rows.rows_per_group == 1
    gate, scale = _aligned(gate), _aligned(scale)
    weight, bias = _at_16_bytes(weight), _at_16_bytes(bias)
    dx = h.new_empty((n, d)) if op.norm else None
    dbranch = h.new_empty((n, d)) if branch is not None else None
    # Per row, the operands' own gradients; else those are what the finalize makes of the parts.
    of_rows = tuple(_gradients_of_rows(o, per_row and op.sums, n, d) for o in (gate, scale, scale))
    groups = 1 if per_row else rows.groups
    blocks, run, cluster = plan.shape(n, rows)
    parts = h.new_empty((blocks // cluster + groups, plan.sums, d), dtype=torch.float32) if plan.sums else None
    order = _order(rows)
    order_arguments = _order_arguments(order, n, rows, run)
    plan.kernel(
        (blocks, 1, 1),
        plan.block,
        *_source(dy),
        *_source(h),
        *_source(dh),
        *_source(branch),
        *_view(gate),
        *_view(scale),
        _address(weight),
        _address(bias),
        _address(mean),
        _address(rstd),
        _address(dx),
        _address(dbranch),
        *map(_address, of_rows),
        _address(parts),
        *order_arguments,
        eps,
        cluster=cluster,
    )
    if plan.finalize is None:
        dgate, dscale, dshift = of_rows
        return RowGradients(dx, dbranch, dgate, dscale, dshift, None, None)
    own = plan.sums_operands
    dgate, dscale, dshift = (
        h.new_empty((groups, d), dtype=torch.float32) if operand and own else None for operand in (gate, scale, scale)
    )
    dweight, dbias, dbranch_bias = (
        h.new_empty(d, dtype=torch.float32) if wanted else None
        for wanted in (weight is not None and own, bias is not None and own, op.branch_sum)
    )
    over_groups = weight is not None or bias is not None or op.branch_sum
    plan.finalize(
        (-(-d // _FINALIZE_COLUMNS), 1 if over_groups else min(groups, _MAX_GRID_Y), 1),
        _FINALIZE_BLOCK,
        _address(parts),
        *_view(gate),
        *_view(scale),
        _address(weight),
        _address(bias),
        _address(dgate),
        _address(dscale),
        _address(dshift),
        _address(dweight),
        _address(dbias),
        _address(dbranch_bias),
        *order_arguments,
        blocks // cluster,
    )
    sums = RowGradients(dx, dbranch, dgate, dscale, dshift, dweight, dbias, dbranch_bias=dbranch_bias)
    return _as_table_gradients(sums, of_rows) if per_row else sums


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


def _source(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0) * x.element_size())


def _view(operand: Operand | None) -> tuple[int, int, int]:
    if operand is None:
        return 0, 0, 0
    return operand.values.data_ptr(), _address(operand.table), operand.values.stride(0)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
