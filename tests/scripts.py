"""A user's script, or torchrun, in a process that is forked from one that has all modules imported."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from tests.distributed.forking import forking


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
    return _start(folder, _as_main, script, arguments)


def start_torchrun(folder: Path, options: list[str], function: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts `torchrun options…` likewise, with a function in place of a script."""
    return _start(folder, torchrun, options, function, *args)


def torchrun(options: list[str], function: Callable[..., None], *args: Any) -> None:
    """What `torchrun` does with these options, its ranks forked from this process."""
    # In place of a script, a function: by the same agent, with the same variables.
    config, _, _ = config_from_args(parse_args([*options, "--start-method=fork", "train.py"]))
    elastic_launch(config, function)(*args)


def printed_in(folder: Path) -> Printed:
    """What the script that was started in a folder has printed."""
    return Printed(*((folder / name).read_text() for name in Printed._fields))


def _start(folder: Path, function: Callable[..., None], *args: Any) -> BaseProcess:
    for name in Printed._fields:
        (folder / name).touch()
    process = forking().Process(target=_run, args=(folder, function, args))
    process.start()
    return process


def _run(folder: Path, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    for number, name in enumerate(Printed._fields, 1):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1))
    torch.multiprocessing.set_start_method("fork", force=True)  # as in any script
    os.chdir(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    try:
        function(*args)
    except Exception:  # the end of a forked process asks neither the hook nor those who wait for the end
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _as_main(script: Path, arguments: tuple[str, ...]) -> None:
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
