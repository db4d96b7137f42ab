"""Each micro-batch is read once per sequence-parallel group.

The ranks of a group train on the same batches. Where samples can be addressed the ranks take turns: each reads every
n-th micro-batch, with its own DataLoader workers ahead of it, so that a group reads as fast as its ranks together. A
plain stream is read by the group's first rank. Either way a batch goes to the other ranks right after reading, one
micro-batch before it is trained on.

*Where the batch is shared.* As it was read, before the user's hooks (``on_before_batch_transfer`` and its like), which
run on every rank: they may hold collectives (an encoder whose parameters are sharded), and what is not there yet could
not be sent ahead. Their random numbers agree, as long as they come from the global generators; results of generators
of their own, or of kernels whose last bit varies, would not. So where a user has such hooks, the strategy shares the
first rank's result once more (`GroupBatches`).

*The same data.* In the first pass through a loader of a user's own, every rank reads its first sample (of a stream its
first batch), and these are compared (see `same_data`). In every pass the ranks compare what their samplers say, batch
by batch. Loaders of data-parallel ranks end together where these wait for each other in every batch: in training, and
wherever parameters are gathered for a forward pass.

*Who reads when.* Each rank's own process reads at a fixed place of the program, when the batch before is handed out,
and never in a thread beside the training: a dataset that draws random numbers there would tear the ranks' noise apart.
What makes reading and training overlap are DataLoader workers (``num_workers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol, runtime_checkable

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_videoscale.compat.lightning import recorded_indices, users_batch_sampler
from lightning_videoscale.compat.torch.loaders import WorkersWithin, copied_loader, reordered_loader
from lightning_videoscale.strategies.batches.same_data import END, Reading, check_same_data, digest_of_indices
from lightning_videoscale.strategies.batches.sharing import BatchSharing, PendingBatch
from lightning_videoscale.strategies.batches.turns import SeedPlace, Turns

_REPEATS = 8
"""How often a rank must read the same to count as untouched by random numbers: a small shuffle repeats by chance."""


@runtime_checkable
class TurnTakingLoader(Protocol):
    """What a loader that is no DataLoader offers for its batches to be read in turn."""

    def taking_turns(self, turn: int, turns: int) -> Iterable[Any]:
        """Returns a loader of the batches ``turn``, ``turn + turns``, ``turn + 2 * turns``, … of this one.

        It follows what this loader's sampler is told, such as the epoch.
        """


class GroupLoader(WorkersWithin):
    """The batches of a loader, equal on all ranks of a sequence-parallel group and each read by one of them.

    Takes the loader's place: length, dataset and samplers are those of the loader. All ranks of the group iterate it
    together. An error on the rank that reads is raised on all of them, when it is the batch's turn; that their data
    differ is raised at once.

    Args:
        loader: What each rank would read by itself.
        sharing: Connects the ranks of the group.
        seed: Seeds the global generators, alike on all ranks of the group if they name the same place.
        to_device: Whether tensors shall arrive on the device.
        ends_together: Whether data-parallel ranks must stop after equally many batches, asked when a pass begins.
        epoch: Of the training, in which a loader may be begun again, as a short one is beside a long one; None where a
            pass is to draw what the one before has drawn.

    Attributes:
        repeats: Passes that were begun before in this epoch.
    """

    def __init__(
        self,
        loader: Any,
        sharing: BatchSharing,
        seed: SeedPlace,
        *,
        to_device: bool,
        ends_together: Callable[[], bool],
        epoch: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._loader: Any = loader._loader if isinstance(loader, GroupLoader) else loader
        self._sharing = sharing
        self._seed = seed
        self._to_device = to_device
        self._ends_together = ends_together
        self._epoch, self.repeats = epoch, 0
        self._begun_in: int | None = None
        axis = sharing.axis
        self._turns: Turns | None = None
        self._readers, self._own = 1, self._loader
        self._is_checked = self._is_planned = isinstance(self._loader, TurnTakingLoader)
        if isinstance(self._loader, TurnTakingLoader):
            self._readers, self._own = axis.size, self._loader.taking_turns(axis.rank, axis.size)
        elif _is_addressable(self._loader):
            self._turns = Turns(_order_of(self._loader), axis.rank, axis.size, seed)
            self._readers, self._own = axis.size, reordered_loader(self._loader, self._turns)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers start at the first batch: Lightning makes the iterator before it sets the epoch.
        begun_in, self._begun_in = self._begun_in, self._epoch()
        self.repeats = self.repeats + 1 if self._begun_in is not None and self._begun_in == begun_in else 0
        indices = recorded_indices(self._loader)
        own = self._start()
        order = iter(()) if self._turns is None else self._turns.order
        may_end_apart = self._may_end_apart()
        pending = self._read_ahead(own, order, 0, may_end_apart)
        for position in count(1):
            if pending.is_end:
                return
            if pending.error is not None:
                ranks = list(self._sharing.axis.ranks)
                pending.error.add_note(
                    f"Rank {pending.source} was reading micro-batch {position - 1} for ranks {ranks}."
                )
                raise pending.error
            coming = self._read_ahead(own, order, position, may_end_apart)
            next(indices, None)
            yield pending.wait()
            pending = coming

    def _start(self) -> Iterator[Any]:
        """Begins a pass, and in the first one sees that all ranks read the same."""
        is_reader, is_checked = self._sharing.axis.rank < self._readers, self._is_checked
        self._is_checked = True
        if is_checked or self._turns is not None:
            own: Iterator[Any] = iter(self._own) if is_reader else iter(())
            if not is_checked:
                self._check(self._first(0))
            return own
        own = self._stream(0, persistent=is_reader)
        first = Reading(own)
        self._check(first)
        return first.followed_by(own) if is_reader else iter(())

    def _check(self, first: Reading) -> None:
        def is_fixed() -> bool:
            """Whether this rank reads the same with other random numbers; the reader's stream may be readable once."""
            if self._turns is None and self._sharing.axis.rank == 0:
                return False
            return all(self._first(attempt).digest == first.digest for attempt in range(1, 1 + _REPEATS))

        # Samples of different numbers differ, which `_read_ahead` will say.
        starts = self._sharing.gather(None if self._turns is None else digest_of_indices(self._turns.first))
        check_same_data(self._loader, self._sharing, first.digest if len(set(starts)) == 1 else None, is_fixed)

    def _first(self, attempt: int) -> Reading:
        """Reads what a pass begins with, and goes no further."""
        if self._turns is None:
            return Reading(self._stream(attempt, persistent=False))
        workers = min(self._loader.num_workers, 1)  # where a dataset may open files that a fork must not share
        # Again means twice, and what counts is the second: a generator that the dataset came with has gone on by then.
        one = reordered_loader(self._loader, self._turns.first * (2 if attempt else 1))
        begun = self._begin(copied_loader(one, num_workers=workers, persistent_workers=False, generator=None), attempt)
        return (Reading(begun), Reading(begun))[1] if attempt else Reading(begun)

    def _stream(self, attempt: int, *, persistent: bool) -> Iterator[Any]:
        passing = isinstance(self._own, DataLoader) and not persistent
        return self._begin(copied_loader(self._own, persistent_workers=False) if passing else self._own, attempt)

    def _begin(self, loader: Iterable[Any], attempt: int) -> Iterator[Any]:
        """Begins to read with equal random numbers on all ranks, in the workers of a DataLoader too."""
        place = ("again", attempt) if attempt else ("read", 0)
        self._seed(*place)
        iterator = iter(loader)
        self._seed(*place)
        return iterator

    def _may_end_apart(self) -> bool:
        """Whether data-parallel ranks must tell each other when their data end, batch by batch."""
        if self._is_planned or self._sharing.dp.size == 1 or not self._ends_together():
            return False
        lengths = self._sharing.gather_over_streams(sized_len(self._loader) if self._turns is not None else None)
        return None in lengths or len(set(lengths)) > 1

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

    def _read_ahead(self, own: Iterator[Any], order: Iterator[Any], position: int, may_end_apart: bool) -> PendingBatch:
        """Reads a micro-batch or learns of it, and leaves all ranks with the same random numbers."""
        digest = 0
        if self._turns is not None:
            self._seed("indices", position)  # a sampler may draw as it goes, on some ranks earlier than on others
            digest = digest_of_indices(next(order, END))

        def read() -> Any:
            self._seed("read", position)  # what a dataset draws must not depend on whose turn it is
            return next(own)

        pending = self._sharing.broadcast(position % self._readers, read, to_device=self._to_device, digest=digest)
        self._seed("batch", position)  # what follows must not depend on who has read
        if len(set(pending.digests)) > 1:
            raise ValueError(
                f"Ranks {list(self._sharing.axis.ranks)} read the batches of one loader in turn, but its "
                f"{type(_order_of(self._loader)).__name__} orders the samples differently on each of them, from "
                f"micro-batch {position} on: some would be lost and others repeated. Draw the order from the default "
                "generators before the first batch, or from a generator that is seeded alike on these ranks; never by "
                "the global rank, nor unseeded. Where you deal one order out by strategy.data_parallel_rank, seed a "
                "generator of your own by the epoch alone: the default ones differ between data-parallel ranks."
            )
        return self._end_together(pending, position) if may_end_apart else pending

    def _end_together(self, pending: PendingBatch, position: int) -> PendingBatch:
        ended = self._sharing.gather_over_streams(pending.is_end)
        if len(set(ended)) == 1:
            return pending
        early, others = ([rank for rank, end in enumerate(ended) if end is which] for which in (True, False))
        message = (
            f"The loaders of data-parallel ranks {early} ended after {position} micro-batches, and those of {others} "
            "have more. "
        )
        if sized_len(self._loader) is not None:  # by which the Trainer decides when to validate
            raise ValueError(
                f"{message}Give all data-parallel ranks equally many, or limit the batches of all to fewer."
            )
        rank_zero_warn(
            f"{message}All end there, and what others have more is not read in this pass: give all data-parallel ranks "
            "equally many, or let the shorter ones start again."
        )
        return PendingBatch(pending.source, pending.digests, error=StopIteration())


def _order_of(loader: DataLoader[Any]) -> Any:
    """What says which samples a loader reads, in batches where it makes any."""
    order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return users_batch_sampler(order)


def _is_addressable(loader: Any) -> bool:
    """Whether a loader reads what its sampler says, and nothing else."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )
