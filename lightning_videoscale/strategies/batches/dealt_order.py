"""An order of samples that is dealt out to the data-parallel ranks, which must draw it alike: `deal_alike`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lightning_videoscale.strategies.generators import generator_states, set_generator_states


class _DealtOrder:
    """A distributed sampler whose order is drawn from equal generators on all ranks.

    Lightning puts one around a sampler of yours, and takes every n-th of what that one draws.
    """

    def __init__(self, sampler: Any, seed: Callable[[], None], device: torch.device) -> None:
        self._sampler, self._seed, self._device = sampler, seed, device

    def __iter__(self) -> Iterator[Any]:
        states = generator_states(self._device)
        self._seed()
        order: Iterator[Any] = iter(self._sampler)
        set_generator_states(states, self._device)  # what datasets draw differs between the ranks
        return order

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._sampler, name)


def deal_alike(loader: object, seed: Callable[[], None], device: torch.device) -> None:
    """Has a loader's distributed sampler, if there is one, draw from the default generators alike on all ranks.

    Args:
        loader: A `DataLoader`, or something else, which is left as it is.
        seed: Seeds the default generators for the epoch that begins, alike on all ranks.
        device: Whose generator is put back with those of the CPU.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and type(sampler) is not DistributedSampler:  # which seeds its own
        batches.sampler = _DealtOrder(sampler, seed, device)  # type: ignore[union-attr]  # it has a sampler
