"""The Triton kernels, interpreted: slow, hence small, but the very code that runs on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_interpreted() -> None:
    """TRITON_INTERPRET counts when Triton is imported, hence a process of its own: one for all, as it starts slowly."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_triton"],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
