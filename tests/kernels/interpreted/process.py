"""Triton's interpreter, in a process of its own, since TRITON_INTERPRET counts when Triton is imported.

`python -m tests.kernels.interpreted.process MODULE arguments…` runs a module as `python -m MODULE arguments…` does.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.kernels.interpreted.shortcuts import shortcuts


def run_interpreted(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a module with its arguments where Triton interprets its kernels on CPU tensors."""
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted.process", *command],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=280,
    )


def main() -> None:
    """Runs what the command line names."""
    del sys.argv[0]
    with shortcuts():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
