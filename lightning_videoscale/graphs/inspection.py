"""One eager call, watched: may a graph stand for it? See `inspect_call`."""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_videoscale.compat.diffusers import cache_of
from lightning_videoscale.compat.torch.autograd import has_hooks, version_of
from lightning_videoscale.compat.torch.trees import tree_flatten, tree_leaves
from lightning_videoscale.graphs.calls import NetworkCall, is_plain
from lightning_videoscale.graphs.snapshot import Snapshot, foreign_hook, stray_parameter
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.region_randomness import RegionRandomness, differing

_DRAWS_ON_HOST = "its forward draws random numbers on the host"
_DRAWS_OUTSIDE = "its forward draws random numbers outside of the region where the sequence is split"
_WHOLE = "its schedule reads tables of all tokens that it is given, of which it sees a slice"


class Inspection(NamedTuple):
    """What was seen.

    Attributes:
        network: The network as it was.
        objection: Why no graph can stand for the call; None if one can.
        bytes: Memory that the pass has kept for backward.
        draws: Whether the device has drawn random numbers.
    """

    network: Snapshot
    objection: str | None
    bytes: int
    draws: bool


def inspect_call(
    network: nn.Module,
    run: Callable[[], Any],
    call: NetworkCall,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    context: SequenceContext | None,
    device: torch.device,
) -> tuple[Any, Inspection]:
    """Runs a call and looks for what a graph would not repeat; returns the network's output, and what was seen.

    That is Python code which keeps something, numbers that are drawn on the host or outside of the split region,
    inputs that are written to, and outputs of which a graph does not see the tensors.
    """
    before, versions = Snapshot(network, device), [version_of(x) for x in call.tensors]
    randomness = RegionRandomness(0) if context is None else context.randomness
    others, outside, kept = _other_generators(), randomness.outside(device), _allocated(device)
    whole = None if context is None or not context.record.wholes else _WHOLE
    result = run()
    kept = _allocated(device) - kept
    drew = differing(outside, randomness.outside(device))
    return result, Inspection(
        before,
        whole
        or foreign_hook(network)
        or cache_of(network)
        or _hooked_parameter(network)
        or stray_parameter(network)
        or _changed(before)
        or _written(versions, call, arguments)
        or _unseen(result)
        or (
            _DRAWS_ON_HOST
            if drew[0] or randomness.drew_on_host or others != _other_generators() or before.has_drawn()
            else None
        )
        or (_DRAWS_OUTSIDE if drew[1] and context is not None else None),
        kept,
        drew[1] or randomness.drew_on_device,
    )


def _hooked_parameter(network: nn.Module) -> str | None:
    names = [name for name, parameter in network.named_parameters() if has_hooks(parameter)]
    return f"{names[0]} has a hook on its gradient" if names else None


def _changed(before: Snapshot) -> str | None:
    where = before.difference()
    return f"its forward changes attributes of {where}" if where is not None else None


def _written(versions: list[int], call: NetworkCall, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    same = all(version == version_of(x) for version, x in zip(versions, call.tensors, strict=True))
    leaves, structure = tree_flatten(arguments)  # lists and dicts may have others now
    same = same and structure == call.structure and all(map(is_, leaves, call.leaves))
    return None if same else "its forward writes to its inputs"


def _unseen(result: Any) -> str | None:
    """A graph writes to the same memory again and hands out copies, which it cannot make of what it does not know."""
    others = {type(leaf).__name__ for leaf in tree_leaves(result) if not is_plain(leaf)}
    return f"it returns an object, {', '.join(sorted(others))}, that may hold tensors" if others else None


def _other_generators() -> tuple[Any, ...]:
    """Those of Python and NumPy."""
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
