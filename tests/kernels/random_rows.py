"""Random row operations: any variant, map, layout and dtype; their inputs, and how a backend's results are judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightning_videoscale.kernels.reference import rows as reference
from lightning_videoscale.kernels.row_types import (
    Operand,
    RowGradients,
    RowInputs,
    RowMap,
    RowOp,
    RowOutputs,
    RowVariant,
    variant_of,
)

EPS = 1e-6
# Relative L2 of a tensor that was computed in float32 and rounded once, by the dtype it is in.
BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


@dataclass(frozen=True)
class RowCase:
    """One row operation and its inputs; the gradients dh and dy are there where the variant has h and y."""

    op: RowOp
    x: Tensor
    branch: Tensor | None
    gate: Operand | None
    scale: Operand | None
    shift: Operand | None
    weight: Tensor | None
    bias: Tensor | None
    rows: RowMap
    dh: Tensor | None
    dy: Tensor | None

    def wide(self) -> RowCase:
        """The same in float64."""
        values = {field.name: _double(getattr(self, field.name)) for field in fields(self)}
        return RowCase(**values)  # type: ignore[arg-type]

    @property
    def inputs(self) -> RowInputs:
        """Of a forward."""
        operands = (self.gate, self.scale, self.shift, self.weight, self.bias)
        return RowInputs(self.x, self.branch, *operands, self.rows, EPS)

    @property
    def forward_arguments(self) -> tuple[RowVariant, RowInputs]:
        """What `RowBackend.forward` takes."""
        return variant_of(self.op, self.inputs), self.inputs

    def backward_arguments(
        self, h: Tensor, mean: Tensor | None, rstd: Tensor | None
    ) -> tuple[RowVariant, RowInputs, Tensor | None, Tensor | None]:
        """What `RowBackend.backward` takes; h is the normed input."""
        branch = self.branch if self.op.gate or self.op.branch_norm else None
        inputs = self.inputs._replace(x=h, branch=branch, shift=None, mean=mean, rstd=rstd)
        table = None if self.shift is None else self.shift.table
        return variant_of(self.op, inputs, has_dh=self.dh is not None, shift_table=table), inputs, self.dh, self.dy


def draw_case(seed: int, device: str, dtypes: tuple[torch.dtype, ...], channels: tuple[int, ...]) -> RowCase:
    """Draws a case from all that row operations allow, at up to a few hundred rows."""
    rng, d = random.Random(seed), random.Random(-seed).choice(channels)
    torch.manual_seed(seed)
    dtype = rng.choice(dtypes)
    op, rows, n = _draw_operation(rng), *_draw_map(rng, device)

    def tensor(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device).to(of)

    values, table, affine = (rng.choice(dtypes) for _ in range(3))

    def operand() -> Operand:
        chunk = tensor(rows.groups, 6, d, of=values)[:, rng.randrange(6)]
        return Operand(chunk, tensor(d, of=table) if rng.random() < 0.5 else None)

    gate = operand() if op.gate else None
    scale = operand() if op.norm and rng.random() < 0.8 else None
    shift = operand() if scale and rng.random() < 0.8 else None
    weight = tensor(d, of=affine) if op.norm and rng.random() < 0.5 else None
    bias = tensor(d, of=affine) if weight is not None and op.norm == "layer" and rng.random() < 0.7 else None
    if gate is None and scale is None:
        rows = RowMap(1, n)
    x = tensor(n, d + 64)[:, :d] if rng.random() < 0.3 else tensor(n, d)
    dh = tensor(n, d) if op.residual and (op.norm is None or rng.random() < 0.8) else None
    dy = (tensor(1, d).expand(n, d) if rng.random() < 0.2 else tensor(n, d)) if op.norm else None
    branch = tensor(n, d) if op.residual else None
    return RowCase(op, x, branch, gate, scale, shift, weight, bias, rows, dh, dy)


def check_outputs(case: RowCase, got: RowOutputs) -> None:
    """Asserts that a forward's results are those of float64, or of the reference where the law rounds between."""
    eager = case.op.rounding == "eager" and case.x.dtype != torch.float32
    judge = case if eager else case.wide()
    expected = reference.forward(*judge.forward_arguments)
    for name, mine, theirs in zip(got._fields, got, expected, strict=True):
        # Statistics are float32, but of an h that was rounded; of float64 it was not.
        dtype = case.x.dtype if name in ("mean", "rstd") and case.op.residual else None
        _check(case, name, mine, theirs, factor=2 if eager else 1, dtype=dtype)


def check_gradients(case: RowCase, h: Tensor, got: RowGradients) -> None:
    """Asserts that a backward's results are those of float64 from the same h."""
    wide, mean, rstd = case.wide(), None, None
    if case.op.norm:
        mean = h.double().mean(1) if case.op.norm == "layer" else None
        centred = h.double() if mean is None else h.double() - mean.unsqueeze(1)
        rstd = torch.rsqrt(centred.square().mean(1) + EPS)
    expected = reference.backward(*wide.backward_arguments(h.double(), mean, rstd))
    tables = [None if v is None else v.sum(0) for v in (expected.dgate, expected.dscale, expected.dshift)]
    expected = expected._replace(dgate_table=tables[0], dscale_table=tables[1], dshift_table=tables[2])
    for name, mine, theirs in zip(got._fields, got, expected, strict=True):
        optional = name.endswith("_table") or (name == "dshift" and case.scale is None) or name == "dx"
        if mine is None and (optional and (name != "dx" or case.op.norm is None)):
            continue
        if mine is None and not case.op.sums and name not in ("dx", "dbranch", "dbranch_bias"):
            continue
        _check(case, name, mine, theirs)


def _check(
    case: RowCase,
    name: str,
    mine: Tensor | None,
    theirs: Tensor | None,
    factor: float = 1,
    dtype: torch.dtype | None = None,
) -> None:
    assert (mine is None) == (theirs is None), f"{name} of {case.op}"
    if mine is None or theirs is None:
        return
    assert mine.shape == theirs.shape
    error = ((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)).item()
    where = f"{case.op} {case.rows.groups}x{case.rows.rows_per_group} {tuple(case.x.shape)} {case.x.dtype}"
    assert error <= factor * BOUNDS[dtype or mine.dtype], f"{name}: relative error {error:.1e}, {where}"


def _draw_operation(rng: random.Random) -> RowOp:
    norm = rng.choice(["layer", "rms", None])
    residual = norm is None or rng.random() < 0.6
    gate = rng.choice([None, "identity", "tanh"] if norm else ["identity", "tanh"]) if residual else None
    rounding = rng.choice(["fp32_once", "eager"])
    branch_norm, sums, branch_sum = (rng.random() < share for share in (0.3, 0.9, 0.5))
    return RowOp(norm, residual, gate, residual and branch_norm, rounding, sums, residual and branch_sum)  # type: ignore[arg-type]


def _draw_map(rng: random.Random, device: str) -> tuple[RowMap, int]:
    """A map, and how many rows it maps."""
    kind = rng.choice(["sample", "frame", "token", "index of tokens", "index of segments"])
    if kind.startswith("index"):
        groups, entries = rng.randint(1, 6), rng.randint(1, 40)
        per_entry = 1 if kind.endswith("tokens") else rng.randint(2, 20)
        index = torch.randint(groups, (entries,), dtype=torch.int32, device=device)
        return RowMap(groups, per_entry, index), entries * per_entry
    groups, each = {
        "sample": (rng.randint(1, 3), rng.randint(1, 300)),
        "frame": (rng.randint(3, 9), rng.randint(2, 40)),
        "token": (rng.randint(2, 300), 1),
    }[kind]
    return RowMap(groups, each), groups * each


def _double(value: object) -> object:
    if isinstance(value, Operand):
        return Operand(value.values.double(), _double(value.table))  # type: ignore[arg-type]
    return value.double() if isinstance(value, Tensor) else value
