"""Run by ../test_triton_rows.py where Triton interprets its kernels on CPU tensors; arguments name the checks."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import torch

from lightning_videoscale.kernels import gelu
from tests.gpu.fuzzing.cases import Options, judge
from tests.kernels.dtype_pairs import HEADS, check_gelu, check_heads, check_rows, every_pair, row_cases
from tests.kernels.gelu_cases import assert_close_to_float64, draw
from tests.kernels.row_cases import Case, all_variants, assert_close_to_oracle, gradients


def divided() -> tuple[list[Case], list[Case]]:
    """Few of all variants, in which every pair of settings occurs that occurs in any; and the others."""

    def pairs(case: Case) -> set[object]:
        return set(itertools.combinations([(name, str(value)) for name, value in vars(case).items()], 2))

    others, few = all_variants(), []
    missing = set().union(*map(pairs, others))
    while missing:
        few.append(max(others, key=lambda case: len(pairs(case) & missing)))
        others.remove(few[-1])
        missing -= pairs(few[-1])
    return few, others


def few_variants() -> None:
    for case in divided()[0]:
        assert_close_to_oracle(replace(case, d=32), "triton")


def other_variants() -> None:
    for case in divided()[1]:
        assert_close_to_oracle(replace(case, d=32), "triton")


def widest() -> None:
    assert_close_to_oracle(Case(b=3, s=4, rows=2, d=2240), "triton")


def widths_and_dtypes() -> None:
    """Tiles with and without a padded tail, groups that end inside a program's rows."""
    for d in (8, 1152):
        assert_close_to_oracle(Case(b=3, s=4, rows=2, d=d), "triton")
    # Not bf16, to which the interpreter truncates where GPUs round.
    for case in (Case(tables=True, affine=True), Case(rows=6, tables=True), Case(activation="tanh", rows=2)):
        assert_close_to_oracle(replace(case, dtype=torch.float16, modulation_dtype=torch.float16), "triton")


def eager_rounding() -> None:
    """The same roundings as the reference: only a different order of a sum may flip one."""
    for norm in ("layer", "rms"):
        for gate in ({}, {"activation": "tanh", "branch_norm": True}):
            case = Case(norm=norm, affine=True, tables=True, dtype=torch.float16, rounding="eager", **gate)  # type: ignore[arg-type]
            t = case.tensors()
            for ours, reference in zip(case.run(t, "triton"), case.run(t, "reference"), strict=True):
                assert (ours != reference).float().mean() < 0.01


def repeats() -> None:
    case = Case(b=3, s=12, rows=12, indexed=True, d=32)
    t = case.tensors()
    runs = [gradients(case.run(t, "triton"), t) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def dtypes() -> None:
    for operation in ("norm_modulate", "gate_residual", "gate_residual_norm_modulate"):
        for case in row_cases(operation)[::3]:  # all of them on GPUs
            check_rows(case, "triton")
    for heads, of_roles in zip(HEADS, every_pair(3), strict=False):
        check_heads(heads, of_roles, "triton")
    for dtype, bias_dtype in every_pair(2):
        check_gelu(dtype, bias_dtype, "triton")


def gelus() -> None:
    """Tiles and rows with and without a tail."""
    for n, f in ((1, 1), (3, 24), (4, 512), (47, 600), (20, 1536)):
        for dtype in (torch.float32, torch.float16):
            assert_close_to_float64(draw(n, f, dtype=dtype), draw(n, f, dtype=dtype, seed=1), "triton")
    strided = torch.stack([draw(9, 32)] * 2, dim=1)[:, 1]
    assert_close_to_float64(strided, draw(9, 32, seed=1), "triton")
    x = draw(3, 24)
    assert torch.equal(gelu(x, backend="triton"), gelu(x, draw(24), backend="triton"))
    x, bias = draw(61, 64), torch.zeros(64, requires_grad=True)
    runs = [torch.autograd.grad(gelu(x, bias, backend="triton").sum(), bias)[0] for _ in range(2)]
    assert torch.equal(*runs)


def fuzz() -> None:
    """A sample of tests/gpu/fuzz_ops.py."""
    results = [judge(seed, Options("cpu", "triton", elements=64, interpreted=True)) for seed in range(6_726, 6_741)]
    assert not [(verdict.seed, verdict.message) for verdict in results if verdict.status == "wrong"]
    assert sum(verdict.status == "right" for verdict in results) > 0.6 * len(results)  # others are refused by name


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
