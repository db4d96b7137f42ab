"""Replaces a method of one object, and takes it back: `patch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Method(NamedTuple):
    """A method of one object.

    Attributes:
        owner: The object.
        name: The method's name.
    """

    owner: Any
    name: str


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives one object an attribute of its own, in front of its class's; other objects of the class keep theirs.

    Args:
        owner: The object, such as a module.
        name: Of the attribute, such as ``"forward"``.
        value: What takes its place.

    Returns:
        A function that takes it back. Of several patches of one attribute the last is taken back first.
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)

    def undo() -> None:
        delattr(owner, name)  # the class's own comes to light again
        if before is not missing:
            setattr(owner, name, before)

    return undo
