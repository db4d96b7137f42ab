"""What hooks on a network write down, such as hidden states in a list: put back after a run that nobody asked for.

A loss of `features[0]` would otherwise be one of a rehearsal in the first step, without gradients and without an error.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isclass, isfunction, ismethod, ismodule
from itertools import chain
from typing import Any

from torch import nn

from lightning_videoscale.compat.torch.modules import hooks_of
from lightning_videoscale.parallel.verification.user_code import functions_of_users

_CONTAINERS = (list, dict, defaultdict, OrderedDict, set, deque)
_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_videoscale", "deepspeed", "builtins"}
_EMPTY_MODULE = vars(nn.Module()).keys()


@contextmanager
def undone(network: nn.Module) -> Iterator[None]:
    """Afterwards, what hooks of users on a network's modules reach is as before.

    This is what their functions refer to, attributes of it, and lists, dicts, sets and deques in these. What an
    iterator or a generator has given is gone.
    """
    with ExitStack() as undo:
        for x in reached(network):
            _keep(x, undo)
        yield


def reached(network: nn.Module) -> list[Any]:
    """Returns the objects that hooks on a network's modules refer to, and what users have put in place of a forward."""
    found: dict[int, Any] = {}
    for module in network.modules():
        hooks = chain.from_iterable(hooks.values() for hooks in hooks_of(module) or ())
        for function in (*hooks, *functions_of_users(module)):
            found |= {id(x): x for x in _referred(function)}
    return list(found.values())


def _referred(hook: Any) -> list[Any]:
    """The objects that a function of a user's refers to, itself if it is an object that can be called."""
    if isinstance(hook, functools.partial):
        return [*hook.args, *hook.keywords.values(), *_referred(hook.func)]
    if ismethod(hook):
        return [hook.__self__, *_referred(hook.__func__)]
    if not isfunction(hook):
        return [hook]
    if _is_of_library(hook):
        return []
    cells = [cell.cell_contents for cell in hook.__closure__ or () if _is_filled(cell)]
    named = [hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__]
    inner = [x for each in cells if isfunction(each) or ismethod(each) for x in _referred(each)]
    return [*cells, *inner, *named, *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]


def _is_of_library(x: Any) -> bool:
    return x.__module__.partition(".")[0] in _LIBRARIES


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _keep(x: Any, undo: ExitStack) -> None:
    if type(x) in _CONTAINERS:
        _keep_content(x, undo)
    elif hasattr(x, "__dict__") and not (isclass(x) or ismodule(x) or isfunction(x)):
        if all(map(_is_of_library, type(x).__mro__)):  # FSDP2 makes a class of its own of a user's
            return
        before = attributes(x)
        undo.callback(put_back_attributes, x, before)
        for value in before.values():
            if type(value) in _CONTAINERS:
                _keep_content(value, undo)


def _keep_content(container: Any, undo: ExitStack) -> None:
    """Of a container and, as a list for each layer, of those that a dict holds."""
    before = container.copy()
    add: Callable[[Any], object] = container.update if isinstance(container, dict | set) else container.extend

    def put_back() -> None:
        container.clear()
        add(before)

    undo.callback(put_back)
    for value in before.values() if isinstance(before, dict) else ():
        if type(value) in _CONTAINERS:
            _keep_content(value, undo)


def attributes(x: Any) -> dict[str, Any]:
    """Returns the attributes of an object, but for what a module of torch is made of."""
    return {name: value for name, value in vars(x).items() if name not in _EMPTY_MODULE}


def put_back_attributes(x: Any, before: dict[str, Any]) -> None:
    """Makes the `attributes` of an object what they were."""
    for name in attributes(x).keys() - before.keys():
        del vars(x)[name]
    vars(x).update(before)
