"""qk_norm_rope in Triton: on CPU in Triton's interpreter, which a process of its own is started for.

The interpreter truncates where a GPU rounds to bfloat16, hence float16 here; bfloat16 is tested on GPUs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope
from tests.kernels.interpreted.process import run_interpreted
from tests.kernels.qk_checks import (
    check_accuracy,
    check_parts,
    check_projection_biases,
    check_repeats,
    check_tables_of_channels,
)
from tests.kernels.qk_oracle import FAMILIES, Case, cases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
DTYPES = (torch.float32, torch.float16)


def case_param(name: str, is_quick: bool, *more: torch.dtype) -> Any:
    """A case for a parametrized test, which `make test` takes only where it is among the quick ones."""
    marks = [] if is_quick else [pytest.mark.full]
    return pytest.param(FAMILIES[name], *more, marks=marks, id="-".join((name, *(str(dtype)[6:] for dtype in more))))


CASES_AND_DTYPES = [  # the dtypes in turn, then both
    case_param(name, i % 2 == j, dtype) for i, name in enumerate(FAMILIES) for j, dtype in enumerate(DTYPES)
]


@pytest.mark.skipif(INTERPRETED, reason="is what started this process")
def test_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("markexpr")
    done = run_interpreted("pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, __file__)
    assert done.returncode == 0, done.stdout + done.stderr


@in_the_interpreter
def test_refuses_float64_by_name() -> None:
    arguments = Case().arguments()
    with pytest.raises(NotImplementedError, match="float64"):
        qk_norm_rope(*arguments.tensors, **arguments.options, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on CPU")
def test_refuses_the_cpu_by_name() -> None:
    arguments = Case().arguments(torch.float32)
    with pytest.raises(NotImplementedError, match="the cpu"):
        qk_norm_rope(*arguments.tensors, **arguments.options, backend="triton")


@in_the_interpreter
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES)
def test_accuracy(case: Case, dtype: torch.dtype) -> None:
    check_accuracy(case, dtype, "triton")


@in_the_interpreter
@settings(max_examples=3, deadline=None)
@given(case=cases().filter(lambda case: case.head_dim > 2), seed=st.integers(0, 99))
def test_accuracy_of_anything(case: Case, seed: int) -> None:
    check_accuracy(case, torch.float32, "triton", seed=seed)


@in_the_interpreter
@pytest.mark.parametrize("name", ["Wan", "CogVideoX"])
def test_accuracy_of_heads_that_fill_no_tile(name: str) -> None:
    wide = replace(FAMILIES[name], heads=3, kv_heads=3, head_dim=96, pairs=48)
    check_accuracy(wide, torch.float16, "triton")


@in_the_interpreter
@pytest.mark.parametrize("case", [case_param(name, name in ("Wan", "CogVideoX")) for name in FAMILIES])
def test_repeats_bitwise(case: Case) -> None:
    check_repeats(case, torch.float32, "triton")


@in_the_interpreter
@pytest.mark.parametrize(
    "case", [Case(kv_heads=2), Case(pairs=0), Case(layout="half", table_heads=True, start=1, rotated=3)]
)
def test_parts_of_rows(case: Case) -> None:
    check_parts(case, torch.float32, "triton")


@in_the_interpreter
@pytest.mark.parametrize("case", [Case(), Case(layout="half_fma", table_heads=True, table_batch=True)])
def test_tables_of_channels(case: Case) -> None:
    check_tables_of_channels(case, torch.float32, "triton")


@in_the_interpreter
def test_gradients_of_the_projections_biases() -> None:
    check_projection_biases(Case(), torch.float32, "triton")


@in_the_interpreter
@pytest.mark.parametrize("head_dim", [1, 5])
def test_refuses_odd_heads_by_name(head_dim: int) -> None:
    q = torch.randn(1, 2, 3, head_dim)
    with pytest.raises(NotImplementedError, match=f"an even Dh; got {head_dim}"):
        qk_norm_rope(q, q, backend="triton")


@in_the_interpreter
def test_empty_k() -> None:
    q, k, *_ = Case(pairs=0).arguments(torch.float32).tensors
    assert q is not None and k is not None
    outputs = qk_norm_rope(q, k[:, :0], backend="triton")
    assert outputs[0].shape == q.shape and outputs[1].shape == (2, 0, 4, 8)
    (outputs[0].sum() + outputs[1].sum()).backward()
