"""Replaces a method of one object, and takes it back: `patch`; `only_redirects` marks a harmless replacement.

`own_forward`           what is in place of a class's forward, beneath such replacements
`call_within`           has a module call torch's attention inside of a context
`around_attention`      that context, for modules that say where they call it
`instead_of_attention`  what has the same effect as torch's attention in there
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

_Forward = TypeVar("_Forward", bound=Callable[..., Any])
_Result = TypeVar("_Result")


class Method(NamedTuple):
    """A method of one object."""

    owner: Any
    name: str


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives one object an attribute of its own, in front of its class's; other objects of the class keep theirs.

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


def only_redirects(forward: _Forward, beneath: Any = None) -> _Forward:
    """Marks a forward that calls a module's own and neither reads nor changes what that takes and returns.

    Args:
        forward: It.
        beneath: What it calls, if that is in place of the class's; see `own_forward`.
    """
    vars(forward)["only_redirects_to"] = beneath
    return forward


def own_forward(module: Any) -> Any:
    """What a module has in place of its class's forward, beneath what only redirects; None if nothing."""
    own = module.__dict__.get("forward")
    return getattr(own, "only_redirects_to", own)


def replaces_forward(module: Any) -> bool:
    """Whether a module has a forward of its own that may read or change what its class's takes and returns."""
    return own_forward(module) is not None


_AROUND = "around_attention"


def call_within(module: Any, context: AbstractContextManager[Any], call: Callable[[], _Result]) -> _Result:
    """Returns ``call()``, in which a module that `says_where_it_attends` enters ``context`` there, and only there.

    Entered around the whole forward, a mode of torch would see every operation of it and every look at a shape.
    """
    own = module.__dict__
    own[_AROUND] = context
    try:
        return call()
    finally:
        own.pop(_AROUND, None)


def around_attention(module: Any) -> AbstractContextManager[Any]:
    """What a module is to call torch's attention in; nothing in most, and in compiled code."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return module.__dict__.get(_AROUND) or nullcontext()


def instead_of_attention(module: Any) -> Callable[..., Any] | None:
    """What a module may call there instead of torch's attention, with tensors (B, S, H, D) and a mask; or None."""
    if torch.compiler.is_compiling():
        return None
    return getattr(module.__dict__.get(_AROUND), "attend_tokens_first", None)


def says_where_it_attends(module: Any) -> bool:
    """Whether a module's own forward calls attention inside of `around_attention` alone."""
    cls: Any = type(module)
    return getattr(cls, "forward_says_where_it_attends", False) and "forward" not in module.__dict__
