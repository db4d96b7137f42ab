"""Work between training steps that is no training, such as sampling: those who watch the training look away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl


class Pauses:
    """Counts pauses that lie within each other, such as sampling in a validation: the outermost is what matters."""

    def __init__(self) -> None:
        self._open = 0

    def begin(self) -> bool:
        """Begins a pause; returns whether it lies in no other."""
        self._open += 1
        return self._open == 1

    def end(self) -> bool:
        """Ends the pause that began last; returns whether none is left."""
        self._open -= 1
        return self._open == 0


@runtime_checkable
class LooksAway(Protocol):
    """A callback that measures the training, and leaves out what others do between its steps."""

    def look_away(self) -> None:
        """What comes now is no training."""

    def look_again(self) -> None:
        """The training goes on."""


@contextmanager
def unwatched(trainer: pl.Trainer) -> Iterator[None]:
    """Keeps what happens within out of the figures of all callbacks; between micro-batches, on all ranks.

    The step clock needs no word of it: between micro-batches it counts for none of their phases.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    watching = [callback for callback in callbacks if isinstance(callback, LooksAway)]
    for callback in watching:
        callback.look_away()
    try:
        yield
    finally:
        for callback in watching:
            callback.look_again()
