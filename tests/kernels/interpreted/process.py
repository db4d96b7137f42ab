"""Triton's interpreter, in a process of its own, since TRITON_INTERPRET counts when Triton is imported.

`python -m tests.kernels.interpreted.process MODULE arguments…` runs a module as `python -m MODULE arguments…` does.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch


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
    """Runs what the command line names, with Triton's language replaced once a launch and module.

    Triton 3.7 replaces it for every call of a function that a kernel calls, half of the time of all: the first call of
    a launch has done it for all functions that see the same language.
    """
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        if function.__module__ in replaced:
            return None  # of functions that a kernel calls, nobody looks at it
        replaced.add(function.__module__)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        launch(self, *args, **kwargs)

    del sys.argv[0]
    with (
        patch.object(interpreter, "_patch_lang", replace_once),
        patch.object(interpreter.GridExecutor, "__call__", launch_anew),
    ):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
