"""The line that a thread executes, as its users would name it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from lightning_videoscale.compat.python import ThreadStack

_NOT_THE_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
    "<",
)
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def line_of(stack: ThreadStack) -> str:
    """Returns the line that a thread executes, the innermost one that is not of an installed package."""
    lines = [found for line in stack.read().splitlines() if (found := _LINE.fullmatch(line))]
    if not lines:
        return "an unknown line"
    shown = next((line for line in lines if not line["file"].startswith(_NOT_THE_USERS)), lines[0])
    return f"{Path(shown['file']).name}:{shown['line']} in {shown['name']}"
