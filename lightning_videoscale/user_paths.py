"""Names of files and folders as users give them."""

from __future__ import annotations

import os
import re
from pathlib import Path


def is_url(path: str | Path) -> bool:
    """Whether it is a URL, also one that a `Path` has shortened to a single slash."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def local(path: str | Path) -> Path:
    """Returns a path on this machine, in which ``~`` is the user's home, as for Lightning's own checkpoints."""
    return Path(os.path.expanduser(path))  # pathlib's fails where a name begins with ~ and is nobody's


def on_disk(path: str | Path, argument: str) -> Path:
    """Returns the `local` path that a user gives for an argument.

    Raises:
        ValueError: If it is a URL.
    """
    if is_url(path):
        raise ValueError(f"{argument}={str(path)!r} is a URL: name a place on a disk, and copy it from or to there.")
    return local(path)
