"""Whether a class's method is still the one it was written with, and which version of it.

`source_hash`      names a version of a method, and of what is wrapped around it
`replacement_of`   says what took a method's place after its class was written
`is_known`         whether a method is one of the versions that a fused forward was written for
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch


@functools.cache
def source_hash(function: Callable[..., Any]) -> str | None:
    """Returns 16 hexadecimal digits of the SHA-256 of a function's source, or None where there is no source.

    A function that wraps others (``functools.wraps``) is hashed with all of them, outermost first.
    """
    layers: list[Any] = [function]
    try:
        inspect.unwrap(function, stop=lambda outer: layers.append(inspect.getattr_static(outer, "__wrapped__")))
        # Of the code, since `getsource` of a function skips what is wrapped around it.
        source = "".join(textwrap.dedent(inspect.getsource(layer.__code__)) for layer in layers)
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def replacement_of(cls: type, name: str) -> str | None:
    """Returns what took the place of a method after its class was written, and where it is; None if nothing did.

    A decorator in the class's own body looks the same as a wrapper put around the method later.
    """
    owner = _owner(cls, name)
    return _replacement(owner, owner.__dict__[name])


def is_known(cls: type, name: str, hashes: frozenset[str]) -> bool:
    """Whether a method has one of these hashes, and names in it mean what they mean where its class is."""
    method = getattr(cls, name)
    return source_hash(method) in hashes and _module(inspect.unwrap(method)) == _owner(cls, name).__module__


@functools.cache
def _replacement(owner: type, method: Any) -> str | None:
    if not isinstance(method, FunctionType):
        return f"a {type(method).__module__}.{type(method).__qualname__}"
    code = method.__code__  # which functools.wraps does not rename
    if code.co_qualname.rpartition(".")[0] == owner.__qualname__ and _module(method) == owner.__module__:
        return None
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _owner(cls: type, name: str) -> type:
    for base in cls.__mro__:  # a loop, as fused forwards ask for this in every call
        if name in base.__dict__:
            return base
    raise AttributeError(f"{cls.__qualname__} has no {name}.")


def _module(function: FunctionType) -> str:
    name: str = function.__globals__["__name__"]
    return name
