"""Tensors dealt out to ranks, so that each has about as much to do."""

from __future__ import annotations


class RankAssignment:
    """Assigns tensors to ranks so that all hold about as many elements; the same on every rank."""

    def __init__(self, ranks: int) -> None:
        self._held = [0] * ranks

    def next(self, elements: int) -> int:
        """Returns the rank that takes the next tensor."""
        rank = self._held.index(min(self._held))
        self._held[rank] += elements
        return rank
