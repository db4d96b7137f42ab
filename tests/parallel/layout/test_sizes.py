"""What follows from the sizes that a user names."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_videoscale.parallel.layout import resolve_sizes


@pytest.mark.parametrize(
    ("ulysses", "ring", "sp", "expected"),
    [
        (None, None, None, (8, None)),  # a group spans the node, and how it divides is open
        ("auto", "auto", None, (8, None)),
        (None, None, 4, (4, None)),
        (None, None, 1, (1, 1)),
        (4, None, None, (4, 4)),  # Ulysses alone
        (4, 1, None, (4, 4)),
        (4, 2, None, (8, 4)),
        (8, 2, None, (16, 8)),  # two nodes
        (None, 2, None, (8, 4)),
        ("auto", 2, None, (8, 4)),
        (2, "auto", None, (8, 2)),
        (2, None, 4, (4, 2)),
        (2, "auto", 4, (4, 2)),
        (2, 2, 4, (4, 2)),
    ],
)
def test_sizes(ulysses: Any, ring: Any, sp: Any, expected: tuple[int, int | None]) -> None:
    assert resolve_sizes(ulysses, ring, sp, usual=8) == expected


@pytest.mark.parametrize(
    ("ulysses", "ring", "sp", "words"),
    [
        (0, None, None, "ulysses_size=0.*at least 1"),
        (None, 0, None, "ring_size=0.*at least 1"),
        (None, None, 0, "sp_size=0.*at least 1"),
        (None, 3, None, "ring_size=3.*8 devices of a node"),
        (3, "auto", None, "ulysses_size=3.*8 devices of a node"),
        (3, None, 4, "ulysses_size=3.*4 ranks of sp_size"),
        (2, 2, 8, "ulysses_size=2, ring_size=2, sp_size=8"),
        ("most", None, None, "'most'"),
    ],
)
def test_sizes_that_contradict_each_other(ulysses: Any, ring: Any, sp: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_sizes(ulysses, ring, sp, usual=8)


def test_without_a_usual_size_one_must_be_named() -> None:
    with pytest.raises(ValueError, match="sp_size"):
        resolve_sizes(None, 2, None)
    assert resolve_sizes(2, None, None) == (2, 2)
