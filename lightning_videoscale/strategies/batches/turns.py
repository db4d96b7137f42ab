"""Reading in turn: every n-th element of an order that the ranks of a group agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, tee
from typing import Any

SeedPlace = Callable[..., None]
"""Seeds the global generators for a place in the run, named by numbers and strings."""


class Turns:
    """Every n-th element of a sampler whose order all ranks of a group must agree on.

    Iterating draws from the global generators at once, not at the first element: samplers that shuffle by them do so
    alike on all ranks, and what comes next (the seeds of a DataLoader's workers) differs between them.

    Attributes:
        order: Of the last pass that began, all elements.
        first: Of its first element, the first sample; empty if there is none.
    """

    def __init__(self, sampler: Iterable[Any], turn: int, turns: int, seed: SeedPlace) -> None:
        self._sampler = sampler
        self._turn = turn
        self._turns = turns
        self._seed = seed
        self.order: Iterator[Any] = iter(())
        self.first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self._seed("order")
        order = iter(self._sampler)
        first = list(islice(order, 1))
        self.first = [element[:1] if isinstance(element, list) else element for element in first]
        self._seed("workers", self._turn)
        mine, self.order = tee(chain(first, order))
        return islice(mine, self._turn, None, self._turns)
