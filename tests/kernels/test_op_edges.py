"""What holds for every operation: dtypes in every pair, what is refused by name, backward in an autocast context."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_videoscale.kernels import gate_residual, gate_residual_norm_modulate, norm_modulate, rope_per_pair
from tests.kernels.dtype_pairs import (
    DTYPES,
    HEADS,
    assert_rounded_once,
    check_gelu,
    check_heads,
    check_rows,
    every_pair,
    row_cases,
)
from tests.kernels.op_calls import CALLS, Call, gradients
from tests.kernels.row_cases import Case, in_float64

ALL_CALLS = pytest.mark.parametrize("name", CALLS)


@pytest.mark.parametrize("operation", ["norm_modulate", "gate_residual", "gate_residual_norm_modulate"])
def test_rows_in_every_pair_of_dtypes(operation: str) -> None:
    for case in row_cases(operation):
        check_rows(case, "reference")


def test_heads_and_gelu_in_every_pair_of_dtypes() -> None:
    for case, dtypes in itertools.product(HEADS, every_pair(3)):
        check_heads(case, dtypes, "reference")
    for dtype, bias_dtype in every_pair(2):
        check_gelu(dtype, bias_dtype, "reference")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_branch_of_another_dtype_with_anything_frozen_or_unused(used: tuple[int, ...], gated: bool) -> None:
    for dtype, branch_dtype in itertools.permutations(DTYPES, 2):
        case = Case(gated=gated, affine=True, tables=True, dtype=dtype, branch_dtype=branch_dtype, branch_bias=True)
        for only in [None, *case.tensors()]:
            t: Any = case.tensors()
            for name in t:
                t[name].requires_grad_(only in (None, name))
            exact: Any = {name: x.requires_grad_(t[name].requires_grad) for name, x in in_float64(t).items()}
            outputs = case.run(t)
            expected = case.oracle(exact, h=outputs[0])
            pairs = [(outputs[i], expected[i]) for i in used if outputs[i].requires_grad]
            if not pairs or not all(truth.requires_grad for _, truth in pairs):
                continue
            mine, theirs = (
                torch.autograd.grad(
                    [pair[side] for pair in pairs],
                    [x for x in given.values() if x.requires_grad],
                    [torch.ones_like(pair[side]) for pair in pairs],
                    allow_unused=True,
                )
                for side, given in ((0, t), (1, exact))
            )
            for got, truth in zip(mine, theirs, strict=True):
                assert (got is None) == (truth is None)
                if got is not None:
                    assert_rounded_once(got, truth, f"{case}, {used} used, only {only} trained")


@ALL_CALLS
@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_is_refused(name: str, trained: bool) -> None:
    """Whichever tensor has the tangent: it would be lost."""
    call = CALLS[name]
    for with_tangent in call.shapes:
        t = {n: x.detach().requires_grad_(trained and x.requires_grad) for n, x in call.tensors().items()}
        x = t[with_tangent].detach()

        def of_one(x: Tensor, t: Any = t, with_tangent: str = with_tangent) -> Tensor:
            return call.run(t | {with_tangent: x})[0]

        with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode"):
            torch.func.jvp(of_one, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{name} has no forward-mode"):
            of_one(forward_ad.make_dual(x, torch.ones_like(x)))
    with forward_ad.dual_level():  # where no tensor has one, nothing changes
        assert all(map(torch.equal, call.run(call.tensors()), call.run(call.tensors())))


@ALL_CALLS
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_gradients_by_transforms_are_refused(name: str, transform: Callable[..., Any]) -> None:
    call = CALLS[name]
    t = {n: x.detach() for n, x in call.tensors().items()}
    first = next(iter(t))
    with pytest.raises(NotImplementedError, match=rf"{name} has no gradient inside torch\.func"):
        transform(lambda x: call.run(t | {first: x})[0].sum())(t[first])


@ALL_CALLS
def test_gradients_of_several_losses_at_once_are_exact_or_refused(name: str) -> None:
    call = CALLS[name]
    t = call.tensors()
    x, (y, *_) = t[next(iter(t))], call.run(t)
    losses = torch.stack([torch.ones_like(y), torch.full_like(y, 2.0)])
    exact = name == "qkv_linear"
    with nullcontext() if exact else pytest.raises(NotImplementedError, match="is_grads_batched=True"):
        one, two = torch.autograd.grad(y, x, losses, is_grads_batched=True)[0]
        torch.testing.assert_close(two, 2 * one)


@ALL_CALLS
def test_a_second_derivative_is_refused(name: str) -> None:
    """Also where it is taken of what the first depends on, as `torch.autograd.functional.jvp` does."""
    call = CALLS[name]
    t = call.tensors()
    outputs = call.run(t)
    cotangents = [torch.ones_like(y, requires_grad=True) for y in outputs]
    first = torch.autograd.grad(outputs, t[next(iter(t))], cotangents, create_graph=True)
    if name != "gate_residual":  # whose residual's gradient is that of h itself
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            torch.autograd.grad(first[0].sum(), cotangents, allow_unused=True)


@ALL_CALLS
def test_backward_has_the_dtypes_of_forward(name: str) -> None:
    """`manual_backward` in a training step runs inside Lightning's autocast context; forward may have run in none."""
    call, tensors = CALLS[name], CALLS[name].tensors()
    expected = gradients(call, tensors)
    assert all(map(torch.equal, gradients(call, tensors, under_autocast=True), expected))


@pytest.mark.parametrize("name", ["fork_norm_modulate", "gelu_linear", "qkv_linear"])
def test_a_tensor_that_is_given_twice_breaks_no_graph(name: str) -> None:
    """As tied weights, and one tensor as scale and shift; those of one shape are one here."""
    call = CALLS[name]
    by_shape = {x.shape: x for x in call.tensors(dtype=torch.float64).values()}
    tied = {n: by_shape[torch.Size(shape)] for n, shape in call.shapes.items()}

    def run(**t: Tensor) -> tuple[Tensor, ...]:
        return call.run(t)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine, theirs = (
        torch.autograd.grad([y.square().sum() for y in f(**tied)], list(by_shape.values())) for f in (compiled, run)
    )
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected)


def _refused(call: Call, tensors: dict[str, Tensor], error: type[Exception], message: str, **settings: Any) -> None:
    with pytest.raises(error, match=message):
        call.run(tensors, **settings)


@ALL_CALLS
def test_what_is_not_floating_or_lies_elsewhere_is_refused(name: str) -> None:
    call, tensors = CALLS[name], CALLS[name].tensors()
    for tensor in tensors:
        x = tensors[tensor].detach()
        for dtype in (torch.int64, torch.bool, torch.complex64):
            _refused(call, tensors | {tensor: x.to(dtype)}, TypeError, f"{tensor} must be floating.*; got {dtype}")
        _refused(call, tensors | {tensor: x.to("meta")}, ValueError, "one device.*meta")


@ALL_CALLS
def test_unknown_names_are_refused(name: str) -> None:
    call, tensors = CALLS[name], CALLS[name].tensors()
    for setting, value in call.settings.items():
        call.run(tensors, **{setting: value})
        _refused(call, tensors, ValueError, f"{setting} must be .*\"{value}\".*; got 'x'", **{setting: "x"})
    if name != "qkv_linear":  # which has but one backend
        _refused(call, tensors, ValueError, "backend must be \"auto\", .*; got 'x'", backend="x")


def test_an_unknown_layout_of_tables_is_refused() -> None:
    with pytest.raises(ValueError, match='layout must be "interleaved", "half" or "half_fma"; got \'halves\''):
        rope_per_pair(torch.ones(5, 8), torch.ones(5, 8), "halves")  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [-1, 5, 2**32, -(2**31) - 1])
def test_entries_that_there_are_not_are_refused(entry: int) -> None:
    """Those that 32 bits do not hold too, which would become others."""
    case = Case(rows=3, indexed=True)
    for operation in ("norm_modulate", "gate_residual", "gate_residual_norm_modulate"):
        t: Any = replace(case, operation=operation).tensors()
        t["index"][1, 2] = entry
        with pytest.raises(IndexError, match=rf"\[0, 5\); got \[.*{entry}"):
            replace(case, operation=operation).run(t)


def test_a_float32_stream_takes_a_half_precision_branch() -> None:
    """A DiT block with a float32 residual stream under bf16 autocast: h, y and dresidual are float32's."""
    residual, gate = torch.randn(2, 6, 64, requires_grad=True), torch.randn(2, 1, 64, requires_grad=True)
    branch = torch.randn(2, 6, 64).bfloat16().requires_grad_()
    h = gate_residual(residual, branch, gate)
    both = gate_residual_norm_modulate(residual, branch, gate)
    assert torch.equal(h, residual + branch.float() * gate) and torch.equal(both[0], h)
    assert torch.equal(both[1], norm_modulate(h))
    of_residual, of_branch = torch.autograd.grad(h.sum(), (residual, branch))
    assert of_residual.dtype is torch.float32 and of_branch.dtype is torch.bfloat16
    assert torch.equal(of_branch, gate.expand(2, 6, 64).bfloat16())
