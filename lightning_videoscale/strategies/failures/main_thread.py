"""Where the main thread is, as seen from another thread: `line_of_main_thread`."""

from __future__ import annotations

import faulthandler
import re
import sysconfig
import tempfile
import threading
from pathlib import Path

_NOT_THE_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
    "<",
)
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def line_of_main_thread() -> str:
    """Returns the line that the main thread executes, the innermost one that is not of an installed package.

    It is read as a crash would print it. Frame objects of another thread, which `sys._current_frames` returns, end the
    process where they are made while `torch.compile` traces there (Python 3.11, torch 2.13).
    """
    ident = threading.main_thread().ident or 0
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        blocks = file.read().decode(errors="replace").split("\n\n")
    mine = next((block for block in blocks if f" {ident:#018x} " in block), "")
    lines = [found for line in mine.splitlines() if (found := _LINE.fullmatch(line))]
    if not lines:
        return "an unknown line"
    shown = next((line for line in lines if not line["file"].startswith(_NOT_THE_USERS)), lines[0])
    return f"{Path(shown['file']).name}:{shown['line']} in {shown['name']}"
