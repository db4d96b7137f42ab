"""The packaged CUDA headers: one file and all that it includes, read as text."""

from __future__ import annotations

import functools
import importlib.resources
import re

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@functools.cache
def with_includes(name: str) -> dict[str, str]:
    """Texts of ``csrc/<name>`` and of every file of ``csrc`` that it includes, directly or not.

    Args:
        name: A file of ``csrc``, such as "rows_forward.cuh".

    Returns:
        File name to text, ``name`` first.

    Raises:
        FileNotFoundError: If a file is not packaged.
    """
    folder = importlib.resources.files("lightning_videoscale") / "csrc"
    texts: dict[str, str] = {}
    wanted = [name]
    while wanted:
        current = wanted.pop(0)
        if current not in texts:
            texts[current] = (folder / current).read_text()
            wanted += _INCLUDE.findall(texts[current])
    return texts
