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
    """Returns a copy of a loader, with own workers, that reads samples, or a batch sampler's, in this order."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return copied_loader(loader, _iterator=None, **{name: order})


class WorkersWithin:
    """For a loader that reads by another, kept as ``_own``: what ends its persistent workers ends those of the other.

    Lightning (2.6) does so through ``_iterator``, where a DataLoader keeps them, of each loader that has the attribute.
    """

    _own: Any

    @property
    def _iterator(self) -> Any:
        return self._own._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._own._iterator = iterator
