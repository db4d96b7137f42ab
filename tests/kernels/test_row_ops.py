"""The three row operations on the reference backend: against a float64 oracle, and the ten pitfalls of such kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_videoscale.kernels import gate_residual, gate_residual_norm_modulate, norm_modulate
from lightning_videoscale.kernels.row_ops import RowCall
from tests.kernels.op_calls import assert_no_graph_break
from tests.kernels.row_cases import Case, all_variants, assert_close_to_oracle, gradients

OPS = torch.ops.lightning_videoscale
WIDTHS = [64, 1152, 1536, 1920, 2240, 2432, 3072, 5120, 5376]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_variant_against_float64(dtype: torch.dtype) -> None:
    for case in all_variants():
        modulation = torch.float32 if dtype is torch.float32 else dtype
        assert_close_to_oracle(replace(case, dtype=dtype, modulation_dtype=modulation), "reference")


@settings(max_examples=25, deadline=None)
@given(
    case=st.sampled_from(all_variants()),
    b=st.integers(1, 3),
    s=st.sampled_from([1, 2, 4, 6]),
    d=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_random_shapes_against_float64(case: Case, b: int, s: int, d: int, dtype: torch.dtype, seed: int) -> None:
    rows = case.rows if s % case.rows == 0 else 1
    modulation = torch.float32 if dtype is torch.float32 else dtype
    case = replace(case, b=b, s=s, d=d, rows=rows, dtype=dtype, modulation_dtype=modulation, seed=seed)
    assert_close_to_oracle(case, "reference")


def test_rounding_laws_are_those_of_eager_code() -> None:
    """Pitfall 1. To the bit: Wan's expressions for "fp32_once", plain bf16 modules for "eager"."""
    case = Case(d=1152, dtype=torch.bfloat16)
    t: Any = case.tensors()
    x, branch, gate, scale, shift = t["residual"], t["branch"], t["gate"], t["scale"], t["shift"]
    h = (x.float() + branch * gate).type_as(x)
    y = (torch.nn.functional.layer_norm(h.float(), (1152,), eps=1e-6) * (1 + scale) + shift).type_as(x)
    ours = gate_residual_norm_modulate(x, branch, gate, scale, shift)
    assert torch.equal(ours[0], h) and torch.equal(ours[1], y)

    gate, scale, shift, table = (m.bfloat16() for m in (gate, scale, shift, shift[0, 0]))
    h = x + gate * branch
    rms = (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    y = rms * table * (1 + (scale + table)) + (shift + table)
    ours = gate_residual_norm_modulate(
        x, branch, gate, scale, shift, table, norm="rms", scale_table=table, shift_table=table, rounding="eager"
    )
    assert torch.equal(ours[0], h) and torch.equal(ours[1], y)

    layer = torch.nn.functional.layer_norm(x, (1152,), table, table, 1e-6) * (1 + scale) + shift
    ours_layer = norm_modulate(x, scale, shift, table, table, rounding="eager")
    assert (ours_layer != layer).float().mean() < 1e-3  # layer_norm adds in another order on CPU

    mochi = x + ((branch.float() * torch.rsqrt(branch.float().pow(2).mean(-1, keepdim=True) + 1e-6)) * gate.tanh()).to(
        x.dtype
    )
    ours_mochi = gate_residual(x, branch, gate, gate_activation="tanh", branch_norm=True, rounding="eager")
    assert torch.equal(ours_mochi, mochi)


def test_the_seam_is_the_two_operations_in_turn() -> None:
    """Pitfall 1: h is rounded before its statistics are taken."""
    case = Case(dtype=torch.bfloat16, tables=True, rows=2, activation="tanh")
    t: Any = case.tensors()
    h, y = case.run(t)
    alone = gate_residual(t["residual"], t["branch"], t["gate"], gate_table=t["gate_table"], gate_activation="tanh")
    assert torch.equal(h, alone)
    tables = {"scale_table": t["scale_table"], "shift_table": t["shift_table"]}
    assert torch.equal(y, norm_modulate(h, t["scale"], t["shift"], **tables))


def test_dtypes_of_gradients_and_of_a_residual_wider_than_its_branch() -> None:
    """Pitfall 2."""
    t: Any = Case(dtype=torch.float32, modulation_dtype=torch.bfloat16, tables=True, branch_bias=True).tensors()
    t["branch"] = t["branch"].detach().bfloat16().requires_grad_()
    outputs = gate_residual_norm_modulate(**t)
    assert [o.dtype for o in outputs] == [torch.float32] * 2
    for leaf, gradient in zip(t.values(), gradients(outputs, t), strict=True):
        assert gradient.dtype is leaf.dtype and gradient.shape == leaf.shape


def test_sums_are_not_taken_in_the_parameters_dtype() -> None:
    """Pitfall 2: 4096 ones in bf16 would stop at 256."""
    shift = torch.zeros(1, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    norm_modulate(torch.randn(1, 4096, 64).bfloat16(), torch.zeros_like(shift), shift).backward(
        torch.ones(1, 4096, 64).bfloat16()
    )
    assert shift.grad is not None and (shift.grad == 4096).all()


def test_parts_that_do_not_belong_together_are_refused() -> None:
    """Pitfall 3."""
    x, m, w = torch.ones(2, 3, 8), torch.ones(2, 1, 8), torch.ones(8)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("given together", {"weight": w}),
        ("RMSNorm has no bias", {"norm": "rms", "weight": w, "bias": w}),
        ("shift needs a scale", {"shift": m}),
        ("none of which is given", {"scale_table": w}),
        ("scale_table must have shape", {"scale": m, "scale_table": torch.ones(1, 8)}),
        ("R dividing", {"scale": torch.ones(2, 2, 8)}),
        ("With an index", {"scale": m, "index": torch.zeros(2, 3, dtype=torch.int64)}),
        ("index must be", {"scale": torch.ones(4, 8), "index": torch.zeros(2, 2, dtype=torch.int64)}),
        ("index must be", {"scale": torch.ones(4, 8), "index": torch.zeros(2, 3)}),
        ("one device", {"scale": m.to("meta")}),
        ('norm must be "layer"', {"norm": "group"}),
        ("backend must be", {"backend": "metal"}),
    ]
    for message, arguments in wrong:
        with pytest.raises(ValueError, match=message):
            norm_modulate(x, **arguments)
    with pytest.raises(IndexError, match=r"\[0, 4\); got \[0, 4\]"):
        norm_modulate(x, torch.ones(4, 8), index=torch.tensor([[0, 1, 4], [0, 0, 0]]))
    with pytest.raises(ValueError, match="branch_norm belongs"):
        gate_residual_norm_modulate(x, x, branch_norm=True)
    with pytest.raises(ValueError, match=r"one shape \(B, S, D\)"):
        gate_residual(x, x[:, :2], m)


@pytest.mark.parametrize("operation", ["norm_modulate", "gate_residual", "gate_residual_norm_modulate"])
def test_layouts_change_nothing(operation: str) -> None:
    """Pitfall 4: transposed and odd-strided activations, chunks of (B, R, 6, D), an expanded dy."""
    case = Case(operation, rows=6, tables=True)
    plain: Any = case.tensors()
    strange: Any = {name: t.detach() for name, t in plain.items()}
    for name in ("x", "residual", "branch"):
        if name in strange:
            strange[name] = strange[name].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("gate", "scale", "shift"):
        if name in strange:
            strange[name] = torch.stack([strange[name]] * 6, dim=2)[:, :, 2]
    strange = {name: t.requires_grad_() for name, t in strange.items()}
    expected, outputs = case.run(plain), case.run(strange)
    assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(expected, outputs, strict=True))
    theirs = torch.autograd.grad(expected, list(plain.values()), [torch.ones_like(o) for o in expected])
    ours = torch.autograd.grad(outputs, list(strange.values()), [o.new_ones(()).expand_as(o) for o in outputs])
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_padding_and_sample_boundaries() -> None:
    """Pitfalls 5 and 6: every width of a real model, several samples and frames; the tail stays out of the variance."""
    for d in WIDTHS:
        assert_close_to_oracle(Case(b=3, s=4, rows=2, d=d, norm="layer"), "reference")


def test_repeats_to_the_bit() -> None:
    """Pitfall 8."""
    for case in (Case(b=3, s=96, rows=96, indexed=True), Case(b=3, s=96, rows=2, tables=True, affine=True)):
        t = case.tensors()
        runs = [gradients(case.run(t), t) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_local_gradients_of_a_split_sequence_add_up() -> None:
    """Pitfall 9: on half the tokens each, gradients of modulation and tables are partial sums of the whole."""
    case = Case("norm_modulate", s=8, tables=True)
    t: Any = case.tensors()
    dy = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2))
    parameters = ["scale", "shift", "scale_table", "shift_table"]

    def sums(tokens: slice) -> list[torch.Tensor]:
        y = norm_modulate(**(t | {"x": t["x"][:, tokens]}))
        return list(torch.autograd.grad(y, [t[name] for name in parameters], dy[:, tokens]))

    for whole, *halves in zip(sums(slice(8)), sums(slice(4)), sums(slice(4, 8)), strict=True):
        torch.testing.assert_close(sum(halves), whole)


@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.parametrize("gated", [True, False])
def test_missing_gradients(unused: int, gated: bool) -> None:
    """Pitfall 10: h or y that nobody uses."""
    case = Case(tables=True, gated=gated, affine=True, branch_bias=True)
    t: Any = case.tensors()
    exact = {name: x.detach().double().requires_grad_() for name, x in t.items()}
    used = 1 - unused
    ours = torch.autograd.grad(case.run(t)[used].sin().sum(), list(t.values()), allow_unused=True)
    theirs = torch.autograd.grad(case.oracle(exact)[used].sin().sum(), list(exact.values()), allow_unused=True)
    for gradient, expected in zip(ours, theirs, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            torch.testing.assert_close(gradient, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operation", ["norm_modulate", "gate_residual", "gate_residual_norm_modulate"])
def test_frozen_inputs_empty_tensors_and_second_derivatives(operation: str) -> None:
    """Pitfall 10."""
    case = Case(operation, tables=True, affine=True, branch_bias=True)
    for name in case.tensors():
        t: Any = case.tensors()
        for other in t:
            t[other].requires_grad_(other == name)
        sum(o.sum() for o in case.run(t)).backward()
        assert [other for other in t if t[other].grad is not None] == [name]
    for b, s in ((0, 6), (2, 0)):
        t = replace(case, b=b, s=s).tensors()
        outputs = replace(case, b=b, s=s).run(t)
        assert all(o.shape == (b, s, 64) for o in outputs)
        assert all(not g.any() for g in gradients(outputs, t))
    t = case.tensors()
    first = torch.autograd.grad(sum(o.square().sum() for o in case.run(t)), list(t.values())[-1], create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{operation} has no second derivative"):
        first[0].sum().backward()


def test_autocast_changes_nothing() -> None:
    """Pitfall 10."""
    for case in (Case(), Case("norm_modulate"), Case("gate_residual")):
        t = case.tensors()
        expected = case.run(t)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(torch.equal(a, b) for a, b in zip(case.run(t), expected, strict=True))


def test_no_silent_fallback() -> None:
    """Pitfall 10: by name it runs or raises."""
    x = torch.ones(1, 2, 8)
    for name in ("triton", "cuda"):
        with pytest.raises(NotImplementedError, match=rf"norm_modulate cannot run .*{name}: .*cpu"):
            norm_modulate(x, backend=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case", [Case(tables=True, branch_bias=True), Case(gated=False), Case(norm="rms", rows=6, activation="tanh")]
)
def test_opcheck(case: Case) -> None:
    t: Any = case.tensors()
    t["x"] = t.pop("residual")
    call = RowCall(**t, norm=case.norm, gate_activation=case.activation, branch_norm=case.branch_norm)  # type: ignore[arg-type]
    torch.library.opcheck(OPS.gate_residual_norm_modulate.default, call)
    h, _, mean, rstd = (o.detach() for o in OPS.gate_residual_norm_modulate(*call))
    given = call._asdict()
    needs = [given[name] is not None for name in RowCall._fields[:11]]
    saved = [given[n] for n in RowCall._fields[1:12] if n not in ("shift", "branch_bias")]
    saved = [None if x is None else x.detach() for x in saved]
    settings = (case.activation, case.branch_norm, "auto", needs, torch.float32 if case.branch_bias else None)
    torch.library.opcheck(
        OPS.gate_residual_norm_modulate_backward.default,
        (torch.ones_like(h), torch.ones_like(h), h, *saved, mean, rstd, 1e-6, case.norm, *settings),
    )
    if case.gated:
        of_gate = {n: t.get(n) for n in ("x", "branch", "gate", "gate_table", "branch_bias")}
        torch.library.opcheck(OPS.gate_residual.default, RowCall(**of_gate, gate_activation=case.activation))
        needs = [n in of_gate and n != "x" and of_gate[n] is not None for n in RowCall._fields[:11]]
        branch, gate, table = (None if x is None else x.detach() for x in [*of_gate.values()][1:4])
        saved = [branch, gate, None, None, None, table, *[None] * 5]
        settings = (case.activation, False, "auto", needs, torch.float32 if case.branch_bias else None)
        arguments = (torch.ones_like(h), None, h, *saved, 1e-6, None, *settings)
        torch.library.opcheck(OPS.gate_residual_backward.default, arguments)


def test_no_graph_break() -> None:
    def block(x: torch.Tensor, branch: torch.Tensor, m: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        h, y = gate_residual_norm_modulate(x, branch, m, m, m, gate_table=table)
        return gate_residual(h, norm_modulate(y, m, m), m)

    t: Any = Case(tables=True).tensors()
    assert_no_graph_break(block, [t[name] for name in ("residual", "branch", "gate", "gate_table")])
