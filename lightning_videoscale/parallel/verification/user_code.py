"""Code of users that runs where a network's sequence is split: `user_code`.

Hooks on blocks, a forward or a processor put in place of the library's, modules of other classes. Most of it works
token by token. What takes a mean over tokens, or a rank's tokens for those of all frames, is wrong without an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import ismethod
from itertools import chain, dropwhile
from typing import Any

from torch import nn

from lightning_videoscale.compat.patching import own_forward
from lightning_videoscale.compat.torch.modules import hooks_of

_LIBRARIES = {
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "torchao",
    "deepspeed",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "lightning_videoscale",
    *sys.stdlib_module_names,
}

_SPLIT_HOOKS = "lightning_videoscale.parallel.split_hooks"


def user_code(network: nn.Module, region: Mapping[str, nn.Module]) -> list[str]:
    """Returns what runs in a region that is of no library known here, as "path: what", one entry for a module at most.

    Args:
        network: Whose forward goes through the region. Hooks on it are outside, but for those that came after its
            split: they are given what is split in front of its forward.
        region: The modules inside, by path.
    """
    around = chain(_hooks_behind_the_split(network), _forwards_of_users(network))
    found = [f"the network: {_name(function)}" for function in around][:1]
    for path, module in region.items():
        what = next(chain(map(_name, functions_of_users(module)), _classes_of_users(module)), None)
        if what is not None:
            found.append(f"{path}: {what}")
    return found


def functions_of_users(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yields hooks of users on a module, and what they have put in place of its forward, or of its processor's call."""
    yield from filter(_is_of_users, chain.from_iterable(hooks.values() for hooks in hooks_of(module) or ()))
    yield from _forwards_of_users(module)
    processor = type(getattr(module, "processor", None))
    yield from filter(_is_of_users, [vars(c)["__call__"] for c in processor.__mro__ if "__call__" in vars(c)][:1])


def _hooks_behind_the_split(network: nn.Module) -> Iterator[Callable[..., Any]]:
    """Hooks of users in front of a network's forward that run after those which split its inputs."""
    before = (hooks_of(network) or ({},))[0].values()
    return filter(_is_of_users, dropwhile(lambda hook: _innermost(hook).__module__ != _SPLIT_HOOKS, before))


def _forwards_of_users(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Of the module itself and of its class, if either is."""
    own, of_class = own_forward(module), type(module).forward
    yield from filter(_is_of_users, (of_class,) if own is None else (own, of_class))


def _classes_of_users(module: nn.Module) -> Iterator[str]:
    processor = getattr(module, "processor", None)
    for each in (type(module), type(processor)):
        classes = (c for c in each.__mro__ if c.__module__.partition(".")[0] not in _LIBRARIES)
        yield from (f"{c.__module__}.{c.__qualname__}" for c in classes)


def _is_of_users(function: Any) -> bool:
    return any(home.partition(".")[0] not in _LIBRARIES for home in _homes(_innermost(function)))


def _homes(function: Any) -> Iterator[str]:
    """Where its code is from, and that of all it wraps: functools.wraps has it give itself out for the innermost."""
    yield str(getattr(function, "__module__", ""))
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield str(getattr(function, "__globals__", {}).get("__name__", "torch"))
        function = _innermost(getattr(function, "__dict__", {}).get("__wrapped__"))


def _name(function: Any) -> str:
    innermost = _innermost(function)
    home = next(home for home in reversed([*_homes(innermost)]) if home.partition(".")[0] not in _LIBRARIES)
    code = getattr(innermost, "__code__", None)  # which functools.wraps does not rename
    name = getattr(innermost, "__qualname__", type(innermost).__qualname__) if code is None else code.co_qualname
    return f"{home}.{name}"


def _innermost(function: Any) -> Any:
    """What a method or a partial calls; an object that can be called itself, whose class says where it is from."""
    while isinstance(function, functools.partial) or ismethod(function):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function
