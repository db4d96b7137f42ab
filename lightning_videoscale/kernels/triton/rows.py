"""The row operations on Triton; interface: `RowBackend`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.kernels.row_types import Operand, RowGradients, RowInputs, RowOp, RowOutputs, RowVariant
from lightning_videoscale.kernels.triton.backward import backward_kernel
from lightning_videoscale.kernels.triton.forward import forward_kernel
from lightning_videoscale.kernels.triton.group_sums import Partials, Walk
from lightning_videoscale.kernels.triton.launch import launch_for, on_device_of, run_kernel

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_CHANNELS = 16384
_KINDS = ("a", "b", "c", "weight", "bias", "branch")  # the sums of the backward kernel, in the order of its arguments


def limit(variant: RowVariant, device: int) -> str | None:
    """Returns why Triton cannot run this, or None if it can."""
    dtypes = {variant.activation, variant.branch, variant.modulation, variant.table, variant.affine} - {None}
    if not dtypes <= set(_DTYPES):
        return f"it computes in float32 and takes {[*_DTYPES]}; got {dtypes}"
    if variant.channels > _MAX_CHANNELS:
        return f"a row of at most {_MAX_CHANNELS} channels fits in registers; got {variant.channels}"
    return None


def forward(variant: RowVariant, inputs: RowInputs) -> RowOutputs:
    """Computes h, y and the statistics in one launch; see `RowBackend`."""
    op, (x, branch, gate, scale, shift, weight, bias, rows, eps, *_) = variant.op, inputs
    n, d = x.shape
    h = x.new_empty(n, d) if op.residual else None
    y = x.new_empty(n, d) if op.norm else None
    mean = x.new_empty(n, dtype=torch.float32) if op.norm == "layer" else None
    rstd = x.new_empty(n, dtype=torch.float32) if op.norm else None
    launch = launch_for(x, (x, branch), backward=False)
    with on_device_of(x):
        run_kernel(
            forward_kernel, (launch.programs,),
            x, branch, h, y, mean, rstd,
            *_pointers(gate), *_pointers(scale), *_pointers(shift), weight, bias, rows.index,
            _stride(x), _stride(branch), *(0 if o is None else _stride(o.values) for o in (gate, scale, shift)),
            n, launch.rows_per_program, rows.rows_per_group, rows.groups, eps,
            NORM=op.norm or "none", TANH=op.gate == "tanh", BRANCH_NORM=op.branch_norm, EAGER=op.rounding == "eager",
            D=d, K=launch.tiles, BLOCK=launch.block, STAGES=launch.stages, num_warps=launch.warps,
            debug=rows.index is not None, sanitize_overflow=False,
        )  # fmt: skip
    return RowOutputs(h, y, mean, rstd)


def backward(variant: RowVariant, inputs: RowInputs, dh: Tensor | None, dy: Tensor | None) -> RowGradients:
    """Computes the gradients in one pass and one small launch that adds the sums; see `RowBackend`."""
    op, per_row, (h, branch, gate, scale, _, weight, bias, rows, eps, mean, rstd) = variant.op, variant.per_row, inputs
    n, d = h.shape
    by_row = _by_row(gate if op.sums and per_row else None, scale if op.sums and per_row else None, n)
    # Of dscale's rows, each reads the bias again.
    launch = launch_for(h, (dh, dy, h, branch, None if by_row[1] is None else bias), backward=True)
    walk = Walk.over(rows, launch, all_rows=per_row)
    kinds = _kinds(gate, scale, weight, bias, per_row) if op.sums else ()
    kinds += ("branch",) if op.branch_sum else ()
    partials = Partials(kinds, walk, h)
    dx = h.new_empty(n, d) if op.norm else None
    dbranch = None if branch is None else branch.new_empty(n, d)
    with on_device_of(h):
        run_kernel(
            backward_kernel, (launch.programs,),
            dh, dy, h, branch, dx, dbranch, mean, rstd,
            *_pointers(gate), *_pointers(scale), weight, bias, rows.index, walk.order, *by_row,
            *partials.slots_of(_KINDS),
            *(_stride(t) for t in (dh, dy, h, branch)), *(0 if o is None else _stride(o.values) for o in (gate, scale)),
            n, launch.rows_per_program, rows.rows_per_group, eps,
            NORM=op.norm or "none", TANH=op.gate == "tanh", BRANCH_NORM=op.branch_norm, PER_ROW=per_row,
            D=d, K=launch.tiles, BLOCK=launch.block, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        sums = partials.finalize()
    dbranch_bias = sums.pop("branch").sum(dim=0) if op.branch_sum else None
    if per_row:
        gradients = _per_row_gradients(dx, dbranch, by_row, sums, weight, bias)
    else:
        gradients = _grouped_gradients(op, dx, dbranch, sums, gate, scale, weight, bias)
    return gradients._replace(dbranch_bias=dbranch_bias)


def _kinds(
    gate: Operand | None, scale: Operand | None, weight: Tensor | None, bias: Tensor | None, per_row: bool
) -> tuple[str, ...]:
    """Which sums the kernel keeps: by group, or over all rows where every row is a group."""
    if not per_row:
        norm = scale is not None or weight is not None
        return (*(("a", "b") if norm else ()), *(("c",) if gate is not None else ()))
    wanted = {
        "a": scale is not None and scale.table is not None,
        "b": scale is not None,  # the shift may have a table, which backward does not see
        "c": gate is not None and gate.table is not None,
        "weight": weight is not None,
        "bias": bias is not None,
    }
    return tuple(kind for kind, there in wanted.items() if there)


def _by_row(gate: Operand | None, scale: Operand | None, n: int) -> list[Tensor | None]:
    """Room for dgate, dscale and dshift where every row has its own."""
    return [None if o is None else o.values.new_empty(n, o.values.shape[1]) for o in (gate, scale, scale)]


def _per_row_gradients(
    dx: Tensor | None,
    dbranch: Tensor | None,
    by_row: list[Tensor | None],
    sums: dict[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
) -> RowGradients:
    a, b, c, dweight, dbias = (sums[kind][0] if kind in sums else None for kind in _KINDS[:5])
    dscale_table = None if a is None or b is None else _dscale(a, b, weight, bias)
    dgate, dscale, dshift = by_row
    return RowGradients(dx, dbranch, dgate, dscale, dshift, dweight, dbias, c, dscale_table, b)


def _grouped_gradients(
    op: RowOp,
    dx: Tensor | None,
    dbranch: Tensor | None,
    sums: dict[str, Tensor],
    gate: Operand | None,
    scale: Operand | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> RowGradients:
    """From A, B and C by group: the factor 1 + scale of a group multiplies its whole sums."""
    dgate = dscale = dshift = dweight = dbias = None
    if gate is not None and "c" in sums:
        dgate = sums["c"]
        if op.gate == "tanh":
            dgate = dgate * (1 - _composed(gate).tanh().square())
    if "a" in sums:
        a, b = sums["a"], sums["b"]
        factor: Tensor | int = 1
        if scale is not None:
            dscale, dshift, factor = _dscale(a, b, weight, bias), b, 1 + _composed(scale)
        dweight = None if weight is None else (a * factor).sum(dim=0)
        dbias = None if bias is None else (b * factor).sum(dim=0)
    return RowGradients(dx, dbranch, dgate, dscale, dshift, dweight, dbias)


def _dscale(a: Tensor, b: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Σ dy · (x̂ · weight + bias)."""
    dscale = a if weight is None else a * weight.float()
    return dscale if bias is None else dscale + b * bias.float()


def _composed(operand: Operand) -> Tensor:
    values = operand.values.float()
    return values if operand.table is None else values + operand.table.float()


def _pointers(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.values, operand.table)


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
