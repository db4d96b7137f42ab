"""Every pair of dtypes that an operation's arguments may have, and what each result may then miss: half a unit in its
last place, and what adding up in float32 costs. For every backend and device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels import gelu, qk_norm_rope
from lightning_videoscale.kernels.backend import BackendName
from tests.kernels.gelu_cases import draw
from tests.kernels.qk_checks import random_like
from tests.kernels.qk_oracle import Arguments, oracle
from tests.kernels.qk_oracle import Case as HeadCase
from tests.kernels.row_cases import Case, gradients, in_float64

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ADDED_UP = 4e-6  # of a tensor's largest value
# Of the last place; Triton's interpreter truncates where GPUs round to bfloat16.
ROUNDED = {torch.float16: 0.5, torch.bfloat16: 1.0 if os.environ.get("TRITON_INTERPRET") == "1" else 0.5}


def every_pair(roles: int) -> list[tuple[torch.dtype, ...]]:
    """Few combinations of dtypes, in which every two roles meet in all nine ways."""
    combinations = list(itertools.product(DTYPES, repeat=roles))

    def pairs(dtypes: Sequence[torch.dtype]) -> set[object]:
        return set(itertools.combinations(enumerate(dtypes), 2))

    missing = set().union(*map(pairs, combinations))
    chosen = []
    while missing:
        chosen.append(max(combinations, key=lambda dtypes: len(pairs(dtypes) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def row_cases(operation: str) -> list[Case]:
    """All pairs of dtypes of an operation's roles; maps, norms, gates and the parts that may be missing in turn."""
    variants = itertools.cycle([
        {"rows": 1, "affine": True, "tables": True},
        {"rows": 6, "norm": "rms", "tables": True},
        {"rows": 3, "indexed": True, "affine": True, "tables": True, "activation": "tanh"},
        {"gated": operation == "gate_residual", "affine": True},
        {"rows": 6, "tables": "shift"},
        {"rows": 6, "affine": True, "tables": True, "activation": "tanh", "branch_norm": True},
    ])  # fmt: skip
    cases = []
    if operation == "norm_modulate":
        for x, modulation, table, affine in every_pair(4):
            cases.append(Case(operation, dtype=x, modulation_dtype=modulation, table_dtype=table, affine_dtype=affine))
    else:
        for x, branch, modulation, table, bias, *affine in every_pair(5 if operation == "gate_residual" else 6):
            case = Case(operation, dtype=x, branch_dtype=branch, modulation_dtype=modulation, table_dtype=table)
            cases.append(replace(case, affine_dtype=(*affine, None)[0], branch_bias=True, bias_dtype=bias))
    return [replace(case, **variant) for case, variant in zip(cases, variants, strict=False)]  # type: ignore[arg-type]


def assert_rounded_once(got: Tensor, exact: Tensor, what: object) -> None:
    """Asserts that every element is the exact one, rounded to its dtype."""
    got, exact, dtype = got.detach().double(), exact.detach().double(), got.dtype
    last_place = ROUNDED.get(dtype, 0.0) * torch.finfo(dtype).eps
    bound = last_place * exact.abs() + ADDED_UP * exact.abs().max() + torch.finfo(dtype).smallest_normal * last_place
    excess = ((got - exact).abs() - bound).nan_to_num(torch.inf, torch.inf)
    assert got.shape == exact.shape and excess.max() <= 0, (
        f"{what}, {dtype}: {int((excess > 0).sum())} of {exact.numel()} elements are wrong, one by {excess.max():.1e}"
    )


def check_rows(case: Case, backend: BackendName, device: str = "cpu") -> None:
    tensors = case.tensors(device)
    exact = in_float64(tensors)
    outputs = case.run(tensors, backend)
    expected = case.oracle(exact, h=outputs[0] if len(outputs) == 2 else None)
    names = [name for name, t in tensors.items() if t is not None and t.is_floating_point()]
    for i, (got, truth) in enumerate(zip(outputs, expected, strict=True)):
        assert_rounded_once(got, truth, f"output {i} of {case} on {backend}")
    for name, got, truth in zip(names, gradients(outputs, tensors), gradients(expected, exact), strict=True):
        assert got.dtype is tensors[name].dtype  # type: ignore[union-attr]
        assert_rounded_once(got, truth, f"gradient of {name} of {case} on {backend}")


_HEAD = HeadCase(head_dim=16, pairs=8)
HEADS = [
    _HEAD,
    replace(_HEAD, norm="layer", per_head=True, kv_heads=2, layout="half"),
    replace(_HEAD, norm="none", table_heads=True, start=1, rotated=3),
    replace(_HEAD, per_head=True, heads=9, kv_heads=9, pairs=4),
]


def check_heads(case: HeadCase, dtypes: tuple[torch.dtype, ...], backend: BackendName, device: str = "cpu") -> None:
    """The dtypes of q and k, of the projections' biases and of the tables; weights have that of q, or float32."""
    dtype, bias_dtype, table_dtype = dtypes
    for weight_dtype in {dtype, torch.float32}:
        given = case.arguments(dtype, device=device)
        q, k, *affine = given.tensors
        affine = [None if t is None else t.detach().to(weight_dtype).requires_grad_() for t in affine]
        rope = tuple(t.to(table_dtype) for t in given.options["rope"])
        given = Arguments([q, k, *affine], given.options | {"rope": rope})
        double = given.double()
        biases = [torch.zeros(x.shape[2] * x.shape[3], dtype=bias_dtype, device=device) for x in (q, k)]  # type: ignore[union-attr]
        biases = [b.requires_grad_() for b in biases]
        outputs = qk_norm_rope(
            *given.tensors, q_proj_bias=biases[0], k_proj_bias=biases[1], **given.options, rounding="at_end",
            backend=backend,
        )  # fmt: skip
        expected = oracle(*double.tensors, **double.options)
        cotangents = random_like(outputs)
        got = torch.autograd.grad(outputs, [*given.leaves, *biases], cotangents)
        exact = torch.autograd.grad(expected, double.leaves, [g.double() for g in cotangents])
        sums = [dx.sum((0, 1)).flatten() for dx in exact[:2]]
        leaves = [*given.leaves, *biases]
        for i, (mine, truth) in enumerate(zip([*outputs, *got], [*expected, *exact, *sums], strict=True)):
            assert mine.dtype is [*outputs, *leaves][i].dtype
            assert_rounded_once(mine, truth, f"result {i} of {case} with {dtypes} and {weight_dtype} on {backend}")


def check_gelu(dtype: torch.dtype, bias_dtype: torch.dtype, backend: BackendName, device: str = "cpu") -> None:
    x, dy = (draw(9, 40, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    x, bias = x.requires_grad_(), torch.zeros(40, dtype=bias_dtype, device=device, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    y, truth = gelu(x, bias, backend=backend), F.gelu(exact, approximate="tanh")
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    (exact_dx,) = torch.autograd.grad(truth, exact, dy.double())
    for got, expected in ((y, truth), (dx, exact_dx), (dbias, exact_dx.sum(0))):
        assert_rounded_once(got, expected, f"gelu of {dtype} with a bias of {bias_dtype} on {backend}")
