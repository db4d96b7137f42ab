"""What a captured graph relies on and cannot see: `Snapshot` of a network.

A graph repeats the kernels of one pass on fixed addresses. It knows nothing of a parameter that was moved, a hook or
an adapter that was added, a scale that was changed. So whatever the Python code of a network may branch on is compared
before each replay. There are tens of thousands of such values, mostly the same objects as before, which is compared
first and in milliseconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, starmap
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_videoscale.compat.torch.autograd import has_hooks
from lightning_videoscale.compat.torch.modules import attributes_beside_parameters, hooks_of
from lightning_videoscale.graphs.host_constants import same_contents
from lightning_videoscale.parallel.context import SequenceContext

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (nn.Module, Tensor, SequenceContext, FunctionType, MethodType, type)
_CONTAINERS = dict, list, set, deque
_GENERATORS = torch.Generator, random.Random, np.random.Generator
_DEPTH = 2  # of containers, and of objects such as attention processors


class Snapshot:
    """What a network's forward may depend on beside its inputs.

    These are its modules' classes, attributes and hooks, and of tensors where they are and whether they train. Contents
    of tensors are left out, as a graph reads them anew; but not of those on the host, which it has read once.

    Args:
        network: It.
        device: Where it computes.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._modules = list(network.modules())
        self._classes = list(map(type, self._modules))
        self._forwards = _forwards(self._classes)
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
        self._drawn_from = [(value, _state_of(value)) for value in self._values if isinstance(value, _GENERATORS)]
        on_host = [x for x in self._tensors if x.device.type == "cpu" != device.type]
        self._on_host = [(x, x.detach().clone()) for x in on_host]

    def difference(self) -> str | None:
        """Says where the network has changed since; None if it has not."""
        if list(map(type, self._modules)) != self._classes:
            return "the class of a module"
        if _forwards(self._classes) != self._forwards:
            return "the forward of a class"
        lengths = list(map(len, self._containers))
        if lengths != self._lengths:
            return self._places[next(i for i, (a, b) in enumerate(zip(lengths, self._lengths, strict=True)) if a != b)]
        values = list(chain.from_iterable(map(_values, self._containers)))
        if not all(map(is_, values, self._values)):
            for number, (value, before) in enumerate(zip(values, self._values, strict=True)):
                if value is not before and _meaning(value) != self._meanings[number]:
                    return self._place(number)
            self._values = values
        if _facts(self._tensors) != self._facts:
            return "where a parameter is, its shape, whether it trains, or a hook on its gradient"
        return None if all(starmap(same_contents, self._on_host)) else "what a tensor on the host contains"

    def has_drawn(self) -> bool:
        """Whether a generator of the network's own has moved since, as of a layer that is dropped at random."""
        return any(_state_of(generator) != state for generator, state in self._drawn_from)

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


def stray_parameter(network: nn.Module) -> str | None:
    """Says which parameter is also reached by another way than as an attribute of a module; None if none is.

    A capture puts others in the place of those attributes, and would have no gradient for it.
    """
    trained = {id(parameter) for parameter in network.parameters() if parameter.requires_grad}
    for path, module in network.named_modules():
        for name, value in attributes_beside_parameters(module).items():
            for container in _containers(value if isinstance(value, _CONTAINERS) else [value], _DEPTH):
                if any(id(item) in trained for each in _values(container) for item in _items(each)):
                    return f"{'.'.join(filter(None, (path, name)))} holds a parameter that no module has by that name"
    return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return generator.getstate() if isinstance(generator, random.Random) else repr(generator.bit_generator.state)


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [hook for kind in hooks_of(module) or () for hook in kind.values()]


def _containers(value: Any, depth: int) -> Iterator[Any]:
    """A container and those in it, as far as they can be changed."""
    yield value
    if depth > 0:
        for item in _values(value):
            if isinstance(item, _CONTAINERS):
                yield from _containers(item, depth - 1)
            elif not isinstance(item, _OPAQUE) and not type(item).__module__.startswith("lightning_videoscale.graphs"):
                inner = getattr(item, "__dict__", None)
                if isinstance(inner, dict):
                    yield from _containers(inner, depth - 1)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _meaning(value: Any) -> Hashable:
    """Equal for values that code cannot tell apart."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, tuple | frozenset | set):
        return type(value), tuple(map(_meaning, value))
    return id(value)


def _forwards(classes: list[type[nn.Module]]) -> list[Any]:
    """Of each class once; somebody may have put another one in its place."""
    return [cls.forward for cls in dict.fromkeys(classes)]


def _facts(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    return (
        list(map(Tensor.data_ptr, tensors)),
        list(map(attrgetter("dtype", "shape"), tensors)),
        list(map(Tensor.stride, tensors)),
        list(map(attrgetter("requires_grad"), tensors)),
        list(map(has_hooks, tensors)),
    )
