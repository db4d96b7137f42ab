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
