"""What a captured graph relies on and cannot see: `Snapshot` of a network.

A graph repeats the kernels of one pass on fixed addresses. It knows nothing of a parameter that was moved, a hook or
an adapter that was added, a scale that was changed. So whatever the Python code of a network may branch on is compared
before each replay. There are tens of thousands of such values, mostly the same objects as before, which is compared
first and in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.parallel.context import SequenceContext

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (nn.Module, Tensor, SequenceContext, FunctionType, MethodType, type)
_DEPTH = 2  # of containers, and of objects such as attention processors


class Snapshot:
    """What a network's forward may depend on beside its inputs.

    These are its modules' classes, attributes and hooks, and of tensors where they are and whether they train. Contents
    of tensors are left out: a graph reads them anew.
    """

    def __init__(self, network: nn.Module) -> None:
        self._modules = list(network.modules())
        self._classes = list(map(type, self._modules))
        self._places: list[str] = []
        self._containers: list[Any] = []
        for path, module in network.named_modules():
            for container in _containers(module.__dict__, _DEPTH):
                self._places.append(path or "the network itself")
                self._containers.append(container)
        self._lengths = list(map(len, self._containers))
        self._values = list(chain.from_iterable(map(_values, self._containers)))
        self._meanings = list(map(_meaning, self._values))
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._facts = _facts(self._tensors)

    def difference(self) -> str | None:
        """Says where the network has changed since; None if it has not."""
        if list(map(type, self._modules)) != self._classes:
            return "the class of a module"
        lengths = list(map(len, self._containers))
        if lengths != self._lengths:
            return self._places[next(i for i, (a, b) in enumerate(zip(lengths, self._lengths, strict=True)) if a != b)]
        values = list(chain.from_iterable(map(_values, self._containers)))
        if not all(map(is_, values, self._values)):
            for number, (value, before) in enumerate(zip(values, self._values, strict=True)):
                if value is not before and _meaning(value) != self._meanings[number]:
                    return self._place(number)
            self._values = values
        return None if _facts(self._tensors) == self._facts else "where a parameter is, or whether it trains,"

    def _place(self, number: int) -> str:
        for place, length in zip(self._places, self._lengths, strict=True):
            if number < length:
                return place
            number -= length
        raise IndexError(number)


def foreign_hook(network: nn.Module) -> str | None:
    """Says which module has a hook that is not of this package, and might keep what a graph overwrites; None if none.

    The network's own hooks run around a graph, so they may be anybody's.
    """
    for path, module in network.named_modules():
        for hook in _hooks(module) if path else ():
            home = getattr(hook, "__module__", "")
            if not home.startswith(("lightning_videoscale.", "torch.")):
                return f"{path} has a hook, {getattr(hook, '__qualname__', hook)} of {home}"
    return None


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [
        hook
        for name, value in module.__dict__.items()
        if name.endswith("_hooks") and isinstance(value, dict)
        for hook in value.values()
    ]


def _containers(value: Any, depth: int) -> Iterator[Any]:
    """A container and those in it, as far as they can be changed."""
    yield value
    if depth > 0:
        for item in _values(value):
            if isinstance(item, dict | list):
                yield from _containers(item, depth - 1)
            elif not isinstance(item, _OPAQUE) and not type(item).__module__.startswith("lightning_videoscale.graphs"):
                inner = getattr(item, "__dict__", None)
                if isinstance(inner, dict):
                    yield from _containers(inner, depth - 1)


def _values(container: Any) -> Any:
    return container if isinstance(container, list) else container.values()


def _meaning(value: Any) -> Hashable:
    """Equal for values that code cannot tell apart."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, tuple | frozenset | set):
        return type(value), tuple(map(_meaning, value))
    return id(value)


def _facts(tensors: list[Tensor]) -> tuple[list[int], list[bool]]:
    return list(map(Tensor.data_ptr, tensors)), list(map(attrgetter("requires_grad"), tensors))
