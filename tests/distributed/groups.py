"""Process groups that serve many Trainers, one after the other."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

Rows = tuple[tuple[int, ...], ...]


@contextmanager
def reused_groups() -> Iterator[None]:
    """Inside, a group is the one that an earlier use of this received for the same ranks, in the same order.

    Nobody ends a strategy's groups before the process ends, and hundreds of Trainers' would fill its memory and its
    table of file descriptors. They also take longer to create than a small model takes to train.
    """
    taken: Counter[tuple[Rows, str | None]] = Counter()

    def reuse(rows: list[list[int]], timeout: Any = None, backend: str | None = None) -> Any:
        key = tuple(map(tuple, rows)), backend
        taken[key] += 1
        return _create(*key, taken[key])

    with patch.object(dist, "new_subgroups_by_enumeration", reuse):
        yield


_new_subgroups = dist.new_subgroups_by_enumeration


@functools.cache
def _create(rows: Rows, backend: str | None, which: int) -> Any:
    """``which`` tells apart the groups of one Trainer that have the same ranks."""
    return _new_subgroups([list(row) for row in rows], backend=backend)
