"""A user's script in a process that is forked from one that has all modules imported."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch


class Printed(NamedTuple):
    """What a script has printed."""

    stdout: str
    stderr: str


def run_forked(folder: Path, script: Path, *arguments: str, seconds: float = 240) -> Printed:
    """Runs `python script arguments…` in a folder, and returns what it prints; raises where it fails."""
    process = start_forked(folder, script, *arguments)
    process.join(seconds)
    was_killed = process.is_alive()
    if was_killed and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    printed = printed_in(folder)
    assert not was_killed and process.exitcode == 0, f"exit code {process.exitcode}\n" + "\n".join(printed)
    return printed


def start_forked(folder: Path, script: Path, *arguments: str) -> BaseProcess:
    """Starts `python script arguments…` in a folder, in a process group of its own, as a terminal gives it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    for name in Printed._fields:
        (folder / name).touch()
    process = context.Process(target=_run, args=(folder, script, arguments))
    process.start()
    return process


def printed_in(folder: Path) -> Printed:
    """What the script that was started in a folder has printed."""
    return Printed(*((folder / name).read_text() for name in Printed._fields))


def _run(folder: Path, script: Path, arguments: tuple[str, ...]) -> None:
    os.setsid()
    for number, name in enumerate(Printed._fields, 1):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1))
    torch.multiprocessing.set_start_method("fork", force=True)  # as in any script
    os.chdir(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:  # the end of a forked process asks neither the hook nor those who wait for the end
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
