"""Does attention still run as it did when its exchanges were checked? `checked_again_after_changes`.

Another processor, another forward or another module in its place may attend to a rank's own tokens only, and no number
looks wrong. diffusers also puts a forward back that was there before the split, when a hook is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_videoscale.compat.torch.modules import children_of
from lightning_videoscale.parallel.verification.trial_run import SplitNetwork

_Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class AttentionAsNoted:
    """What a call of each attention of a split network reaches, as it is now: modules, forwards and processors."""

    def __init__(self, split: SplitNetwork) -> None:
        self._places = [*{key: (path, look) for path, key, look in _places(split)}.values()]
        self._held = self._now()

    def is_unchanged(self) -> bool:
        """Whether all is the same; a look-up for each, as it runs before each call of the network."""
        return self._now() == self._held

    def changed(self) -> list[str]:
        """Returns the paths of the modules that have changed, or been replaced."""
        triples = zip(self._places, self._now(), self._held, strict=True)
        return list(dict.fromkeys(path for (path, _), now, held in triples if now != held))

    def _now(self) -> list[Any]:
        return [look() for _, look in self._places]


def _places(split: SplitNetwork) -> Iterator[tuple[str, Hashable, Callable[[], Any]]]:
    """What looks at what an attention's call reaches, with the path of the module that it is of, and a key for each."""
    for path in split.context.attention:
        with suppress(AttributeError):  # of a module that was taken away
            attention = split.network.get_submodule(path)
            for name in ("forward", "processor"):
                yield path, (id(attention), name), partial(vars(attention).get, name)
            yield path, (id(attention), "classes"), partial(_methods_of_classes, attention)
            names = path.split(".")
            for depth, name in enumerate(names):
                parent = split.network.get_submodule(".".join(names[:depth]))
                yield ".".join(names[: depth + 1]), (id(parent), name), partial(children_of(parent).get, name)


def _methods_of_classes(attention: nn.Module) -> tuple[Any, Any]:
    """What a patch of a whole class may replace."""
    return type(attention).forward, type(getattr(attention, "processor", None)).__call__


def checked_again_after_changes(split: SplitNetwork, check_first: _Hook, check: Callable[..., object]) -> _Hook:
    """Returns a hook for before each call that checks first calls, and the exchanges again where attention changed.

    So a forward that a user wraps later is accepted. All ranks of the group must change attention alike.

    Args:
        split: The network.
        check_first: Checks its first calls and raises if they are wrong; does nothing in later ones.
        check: Is given the positional and the named arguments of a call, and raises if attention does not exchange.
    """
    noted: AttentionAsNoted | None = None
    checking = False

    def hook(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal noted, checking
        if checking or network is not split.network:  # a rehearsal, or a copy, which is split likewise
            return
        checking = True
        try:
            check_first(network, args, kwargs)
            if noted is None:
                noted = AttentionAsNoted(split)
            elif not noted.is_unchanged():
                _check_changed(split.name, noted.changed(), partial(check, args, kwargs))
                noted = AttentionAsNoted(split)
        finally:
            checking = False

    uncompiled: _Hook = torch.compiler.disable(hook)
    return uncompiled


def _check_changed(name: str, changed: list[str], check: Callable[[], object]) -> None:
    try:
        check()
    except ValueError as error:
        raise ValueError(
            f"{', '.join(changed[:3])}{' and others' * (len(changed) > 3)} of {name} has another forward, processor or "
            "module than when its sequence was split. Make such changes before the split, which a Trainer makes when "
            "fit begins. Or call the undo that parallelize has returned, change the network, and split it again. As it "
            f"is: {error}"
        ) from error
