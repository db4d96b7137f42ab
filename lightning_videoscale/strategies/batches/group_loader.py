"""Each micro-batch is read once per sequence-parallel group.

The ranks of a group train on the same batches. Where samples can be addressed the ranks take turns: each reads every
n-th micro-batch, with its own DataLoader workers ahead of it, so that a group reads as fast as its ranks together. A
plain stream is read by the group's first rank. Either way a batch goes to the other ranks right after reading, one
micro-batch before it is trained on.

*Where the batch is shared.* As it was read, before the user's hooks (``on_before_batch_transfer`` and its like), which
run on every rank: they may hold collectives (an encoder whose parameters are sharded), and what is not there yet could
not be sent ahead. Their random numbers agree, as long as they come from the global generators; results of generators
of their own, or of kernels whose last bit varies, would not. So where a user has such hooks, the strategy shares the
first rank's result once more (see `changes_batches`).

*Who reads when.* Each rank's own process reads at a fixed place of the program, when the batch before is handed out,
and never in a thread beside the training: a dataset that draws random numbers there would tear the ranks' noise apart.
What makes reading and training overlap are DataLoader workers (``num_workers``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

from lightning_videoscale.strategies.batches.sharing import BatchSharing, Parcel

SeedPlace = Callable[..., None]
"""Seeds the global generators for a place in the run, named by numbers and strings."""

_HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")
_DEVICE_HOOKS = ("on_after_batch_transfer",)


@runtime_checkable
class TurnTakingLoader(Protocol):
    """What a loader that is no DataLoader offers for its batches to be read in turn."""

    def taking_turns(self, turn: int, turns: int) -> Iterable[Any]:
        """Returns a loader of the batches ``turn``, ``turn + turns``, ``turn + 2 * turns``, … of this one.

        It follows what this loader's sampler is told, such as the epoch.
        """


class GroupLoader:
    """The batches of a loader, equal on all ranks of a sequence-parallel group and each read by one of them.

    Takes the loader's place: length, dataset and samplers are those of the loader. All ranks of the group iterate it
    together. An error on the rank that reads is raised on all of them, when it is the batch's turn.

    Args:
        loader: What each rank would read by itself.
        sharing: Connects the ranks of the group.
        seed: Seeds the global generators, alike on all ranks of the group if they name the same place.
        to_device: Whether tensors shall arrive on the device.
    """

    def __init__(self, loader: Any, sharing: BatchSharing, seed: SeedPlace, *, to_device: bool) -> None:
        self._loader: Any = loader._loader if isinstance(loader, GroupLoader) else loader
        self._sharing = sharing
        self._seed = seed
        self._to_device = to_device
        axis = sharing.axis
        self._readers, self._own = 1, self._loader
        if isinstance(self._loader, TurnTakingLoader):
            self._readers, self._own = axis.size, self._loader.taking_turns(axis.rank, axis.size)
        elif _is_addressable(self._loader):
            self._readers, self._own = axis.size, _take_turns(self._loader, axis.rank, axis.size, seed)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers start at the first batch: Lightning makes the iterator before it sets the epoch.
        indices = _recorded_indices(self._loader)
        own = iter(self._own) if self._sharing.axis.rank < self._readers else iter(())
        parcel = self._post(own, 0)
        for position in count(1):
            if parcel.is_end:
                return
            if parcel.error is not None:
                ranks = list(self._sharing.axis.ranks)
                parcel.error.add_note(f"Rank {parcel.sender} was reading micro-batch {position - 1} for ranks {ranks}.")
                raise parcel.error
            coming = self._post(own, position)
            next(indices, None)
            yield parcel.open()
            parcel = coming

    def __getattr__(self, name: str) -> Any:
        # Not the loader's state: it is one micro-batch ahead, and that of one rank.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """What the DataLoader's workers call first; Lightning sets it to seed them."""
        return self._own.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._own.worker_init_fn = function

    @property
    def _iterator(self) -> Any:
        """What holds the DataLoader's persistent workers; Lightning ends them through it."""
        return self._own._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._own._iterator = iterator

    def _post(self, own: Iterator[Any], position: int) -> Parcel:
        """Reads a micro-batch or learns of it, and leaves all ranks with the same random numbers."""

        def read() -> Any:
            self._seed("read", position)  # what a dataset draws must not depend on whose turn it is
            return next(own)

        parcel = self._sharing.post(position % self._readers, read, to_device=self._to_device)
        self._seed("batch", position)
        return parcel


class _Turns:
    """Every n-th element of a sampler whose order all ranks of a group must agree on.

    Iterating draws from the global generators at once, not at the first element: samplers that shuffle by them do so
    alike on all ranks, and what comes next (the seeds of a DataLoader's workers) differs between them.
    """

    def __init__(self, sampler: Iterable[Any], turn: int, turns: int, seed: SeedPlace) -> None:
        self._sampler = sampler
        self._turn = turn
        self._turns = turns
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        self._seed("order")
        order = iter(self._sampler)
        first = list(islice(order, 1))
        self._seed("workers", self._turn)
        return islice(chain(first, order), self._turn, None, self._turns)


def keeps_host_batches(module: pl.LightningModule) -> bool:
    """Whether hooks of the user expect batches in host memory, as they were read."""
    return _overrides(module, _HOST_HOOKS)


def changes_batches(module: pl.LightningModule) -> bool:
    """Whether hooks of the user run on batches, after which those of a group's ranks might differ."""
    return _overrides(module, (*_HOST_HOOKS, *_DEVICE_HOOKS))


def _overrides(module: pl.LightningModule, hooks: tuple[str, ...]) -> bool:
    owners = (module, getattr(module.trainer, "datamodule", None))
    return any(is_overridden(hook, owner) for hook in hooks for owner in owners)


def _take_turns(loader: DataLoader[Any], turn: int, turns: int, seed: SeedPlace) -> DataLoader[Any]:
    """Returns a copy of a loader that reads every n-th of its batches, by the same samplers."""
    own = copy.copy(loader)
    own._iterator = None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order = getattr(loader, name)
    if isinstance(order, _IndexBatchSamplerWrapper):
        order = order._batch_sampler
    # A DataLoader refuses it after construction, and a subclass may be constructed in ways that cannot be repeated.
    object.__setattr__(own, name, _Turns(order, turn, turns, seed))
    return own


def _is_addressable(loader: Any) -> bool:
    """Whether a loader reads what its sampler says, and nothing else."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def _recorded_indices(loader: Any) -> Iterator[Any]:
    """Advances Lightning's record of which samples a batch holds, which writers of predictions ask for."""
    recorder = getattr(loader, "batch_sampler", None)
    return iter(recorder) if isinstance(recorder, _IndexBatchSamplerWrapper) else iter(())
