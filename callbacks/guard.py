"""Keeps what a callback does on the side from stopping the training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from lightning.pytorch.utilities import rank_zero_warn

_Result = TypeVar("_Result")


class Guard:
    """Says what went wrong, once, and lets the training go on.

    Args:
        name: Who says it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: set[str] = set()

    def attempt(self, what: str, act: Callable[[], _Result]) -> _Result | None:
        """Returns ``act()``, or None where it failed. No collective belongs in here: a rank that fails leaves it out.

        Args:
            what: Completes "could not".
            act: What to do.
        """
        try:
            return act()
        except Exception as error:
            if what not in self._said:
                self._said.add(what)
                # Not from rank zero only: this may fail on one other rank alone.
                warnings.warn(f"{self._name} could not {what}, training goes on: {error!r}", stacklevel=2)
            return None

    def say_once(self, message: str) -> None:
        """Warns, from rank zero, unless this was said before."""
        if message not in self._said:
            self._said.add(message)
            rank_zero_warn(message)
