"""A DataLoader's workers and sampler."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from lightning_videoscale.compat.torch import TORCH


def copied_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Returns a copy of a loader that has other attributes, such as ``num_workers``.

    A DataLoader refuses it after construction, and a subclass may be constructed in ways that cannot be repeated.
    """
    copied = copy.copy(loader)
    for name, value in attributes.items():
        TORCH.get(loader, name)
        object.__setattr__(copied, name, value)
    return copied


def reordered_loader(loader: DataLoader[Any], order: Iterable[Any]) -> DataLoader[Any]:
    """Returns a copy of a loader that reads in another order, with workers of its own.

    Args:
        loader: What reads.
        order: Indices of samples, or of the samples of each batch where the loader has a batch sampler.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return copied_loader(loader, _iterator=None, **{name: order})


class WorkersWithin:
    """Goes before a class that reads by a DataLoader, kept as ``_own``: makes its persistent workers known as its own.

    Lightning (2.6) ends the workers of each loader of a Trainer through ``_iterator``, where torch keeps them.
    """

    _own: Any

    @property
    def _iterator(self) -> Any:
        return TORCH.get(self._own, "_iterator")

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._own._iterator = iterator
