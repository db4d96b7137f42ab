"""A user's script in a process that is forked from one that has all modules imported."""

from __future__ import annotations

import os
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch


class Printed(NamedTuple):
    """What a script has printed."""

    stdout: str
    stderr: str


def run_forked(folder: Path, script: Path, *arguments: str, seconds: float = 240) -> Printed:
    """Runs `python script arguments…` in a folder, and returns what it prints; raises where it fails."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    process = context.Process(target=_run, args=(folder, script, arguments))
    process.start()
    process.join(seconds)
    was_killed = process.is_alive()
    process.kill()
    process.join()
    printed = Printed(*((folder / name).read_text() for name in Printed._fields))
    assert not was_killed and process.exitcode == 0, f"exit code {process.exitcode}\n" + "\n".join(printed)
    return printed


def _run(folder: Path, script: Path, arguments: tuple[str, ...]) -> None:
    for number, name in enumerate(Printed._fields, 1):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1))
    torch.multiprocessing.set_start_method("fork", force=True)  # as in any script
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
