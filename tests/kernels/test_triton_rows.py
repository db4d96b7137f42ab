"""The Triton kernels, interpreted: slow, hence small, but the very code that runs on GPUs."""

from __future__ import annotations

import pytest

from tests.kernels.interpreted.process import run_interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "checks",
    [
        "few_variants widths_and_dtypes eager_rounding repeats dtypes gelus fuzz",  # in one process: it starts slowly
        pytest.param("other_variants widest", marks=pytest.mark.full),
    ],
)
def test_interpreted(checks: str) -> None:
    result = run_interpreted("tests.kernels.interpreted.rows", *checks.split())
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
