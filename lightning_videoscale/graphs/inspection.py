"""One eager call, watched: may a graph stand for it? See `inspect_call`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_videoscale.compat.torch.autograd import has_hooks, version_of
from lightning_videoscale.graphs.calls import NetworkCall
from lightning_videoscale.graphs.snapshot import Snapshot, foreign_hook, stray_parameter
from lightning_videoscale.parallel.context import SequenceContext


class Inspection(NamedTuple):
    """What was seen.

    Attributes:
        network: The network as it was.
        objection: Why no graph can stand for the call; None if one can.
        bytes: Memory that the pass has kept for backward.
    """

    network: Snapshot
    objection: str | None
    bytes: int


def inspect_call(
    network: nn.Module, run: Callable[[], Any], call: NetworkCall, context: SequenceContext | None, device: torch.device
) -> tuple[Any, Inspection]:
    """Runs a call and looks for what a graph would not repeat; returns the network's output, and what was seen.

    That is Python code which keeps something, numbers that are drawn on the host or outside of the split region, and
    inputs that are written to.
    """
    before, versions = Snapshot(network), [version_of(x) for x in call.tensors]
    host, offset = _generators_of_host(), _drawn_on(device)
    kept = torch.cuda.memory_allocated(device)
    result = run()
    kept = torch.cuda.memory_allocated(device) - kept
    return result, Inspection(
        before,
        foreign_hook(network)
        or _hooked_parameter(network)
        or stray_parameter(network)
        or _changed(before)
        or _written(versions, call.tensors)
        or _drawn(host == _generators_of_host(), offset == _drawn_on(device), context),
        kept,
    )


def _hooked_parameter(network: nn.Module) -> str | None:
    names = [name for name, parameter in network.named_parameters() if has_hooks(parameter)]
    return f"{names[0]} has a hook on its gradient" if names else None


def _changed(before: Snapshot) -> str | None:
    where = before.difference()
    return f"its forward changes attributes of {where}" if where is not None else None


def _written(versions: list[int], tensors: list[Tensor]) -> str | None:
    same = all(version == version_of(x) for version, x in zip(versions, tensors, strict=True))
    return None if same else "its forward writes to its inputs"


def _drawn(host_is_same: bool, device_is_same: bool, context: SequenceContext | None) -> str | None:
    if not host_is_same or (context is not None and context.randomness.drew_on_host):
        return "its forward draws random numbers on the host"
    if context is not None and not device_is_same:
        return "its forward draws random numbers outside of the region where the sequence is split"
    return None


def _drawn_on(device: torch.device) -> int:
    """How far a GPU's default generator has come in its stream of random numbers."""
    return torch.cuda.default_generators[device.index].get_offset()


def _generators_of_host() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state[1].tobytes(), numpy_state[2]
