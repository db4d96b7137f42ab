"""The Triton kernels of the row operations, interpreted: slow, hence small, but the very code that runs on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("check", ["every_variant", "widths_and_dtypes", "dtypes", "eager_rounding", "repeats"])
def test_interpreted(check: str) -> None:
    """TRITON_INTERPRET counts when Triton is imported, hence a process of its own."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_triton", check],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
