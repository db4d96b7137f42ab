"""The way back from changes to a model: `Undo`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Takes back what was changed, the latest change first; called again, it finds nothing to do.

    A step that raises stays, with those before it, for the next call.

    Args:
        *steps: What takes back the changes that were made so far, in their order.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

    def add(self, step: Callable[[], object]) -> None:
        """Notes what takes back a change that was made now."""
        self._steps.append(step)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of an instance, which is taken back to what it was, or to none of its own."""
        own = vars(owner)
        self.add(partial(setattr, owner, name, own[name]) if name in own else partial(delattr, owner, name))
        setattr(owner, name, value)

    def __call__(self) -> None:
        """Takes everything back."""
        while self._steps:
            self._steps[-1]()
            self._steps.pop()
