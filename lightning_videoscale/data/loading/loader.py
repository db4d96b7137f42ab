"""A pass over the plan of an epoch, for one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_videoscale.data.encoding.online_encoder import BatchEncoder
from lightning_videoscale.data.loading.parts import Part, ReadPart, in_parts
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.planning import BucketPlanner, EpochPlan, MicroBatch
from lightning_videoscale.data.planning.micro_batch import Batch


class PlannedSampler(Sampler[MicroBatch]):
    """The micro-batches of one data-parallel rank, in the order of the plan.

    Args:
        planner: Makes the plan of an epoch.
        dp_rank: Whose part of it.
        repeat_first_epoch: Whether every epoch uses the plan of the first (to overfit, to validate).
        progress: Where the first pass begins, whatever epoch `set_epoch` is told; None: at the beginning of an epoch.
        epoch: Which one.
        on_begin: Called with where a pass begins, before each.

    Attributes:
        planner: Makes the plan of an epoch.
        is_started: Whether the pass of this epoch has begun.
        taken: Micro-batches of this epoch that were taken to be read, those before a resumed pass included.
    """

    def __init__(
        self,
        planner: BucketPlanner,
        dp_rank: int,
        *,
        repeat_first_epoch: bool = False,
        progress: Progress | None = None,
        epoch: int = 0,
        on_begin: Callable[[Progress], None] | None = None,
    ) -> None:
        self.planner = planner
        self._dp_rank = dp_rank
        self._repeat_first_epoch = repeat_first_epoch
        self._on_begin = on_begin
        self.is_started = False
        self._goes_on = progress is not None
        self._begin(Progress.start(planner, 0 if repeat_first_epoch else epoch) if progress is None else progress)

    @property
    def progress(self) -> Progress:
        """Where the run stood when this pass began; after `replan`, where it stands when the new plan does."""
        return self._parts[-1]

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch, or of what was left of it."""
        return self.progress.plan

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next pass; Lightning calls this before each."""
        self.is_started = False
        if self._repeat_first_epoch:
            return
        passes = epoch - self.progress.trained_as
        if passes and not self._goes_on:
            self._begin(Progress.start(self.planner, self.progress.epoch + passes, epoch))
        else:
            self._begin(self._parts[0])
        if self._on_begin is not None:
            self._on_begin(self.progress)

    def replan(self, planner: BucketPlanner, taken: int) -> None:
        """Plans by another planner from now on: the rest of this pass, and the next ones.

        Args:
            planner: Makes the plans, for as many ranks and micro-batches.
            taken: Micro-batches of this epoch that any rank has taken: the steps that they belong to stay.
        """
        self.planner = planner
        rest = self.progress.replan(planner, taken)
        if rest is None:
            return
        if not self.is_started:
            self._begin(rest)
        elif rest.counted == self.progress.counted:  # what was to come after these steps never began
            self._parts[-1] = rest
        else:
            self._parts.append(rest)

    def state_dict(self, micro_batches: int, is_over: bool = False, has_ended: bool = False) -> dict[str, Any]:
        """Returns the state of the epoch after a number of micro-batches, see `Progress.state_dict`."""
        begun = [part for part in self._parts if part.counted <= micro_batches] or self._parts[:1]
        return begun[-1].state_dict(micro_batches, is_over, has_ended)

    def __iter__(self) -> Iterator[MicroBatch]:
        self.is_started, self._goes_on = True, False
        part = 0
        while part < len(self._parts):  # a part may be added meanwhile
            progress = self._parts[part]
            for micro_batch in progress.plan.micro_batches_of(self._dp_rank, progress.done - progress.counted):
                if part + 1 < len(self._parts) and self.taken == self._parts[part + 1].counted:
                    break
                self.taken += 1
                yield micro_batch
            part += 1

    def __len__(self) -> int:
        return len(self.progress)

    def _begin(self, progress: Progress) -> None:
        self._parts = [progress]
        self.taken = progress.done


class PlannedLoader:
    """Batches of one data-parallel rank; iterating it is one epoch, or what is left of one.

    It wraps a DataLoader rather than being one: Lightning would put its own samplers into a DataLoader (to distribute,
    to overfit), and the plan already says who reads what.

    Args:
        reader: Reads micro-batches.
        sampler: Says which.
        num_workers: Processes that read ahead, see `parts`; 0 reads in this one.
        pin_memory: Whether tensors are put into page-locked memory, from which GPUs copy faster.
        turn: First micro-batch of the sampler that is read.
        turns: Step from one that is read to the next.
        encode: Called in this process with every batch; what it returns takes the batch's place.

    Attributes:
        reader: Reads micro-batches. With it and ``sampler``, any DataLoader reads the same batches:
            ``DataLoader(loader.reader, batch_size=None, sampler=loader.sampler)``, or webdataset's ``WebLoader``.
        sampler: Says which.
    """

    batch_sampler = None

    def __init__(
        self,
        reader: MicroBatchReader,
        sampler: PlannedSampler,
        num_workers: int = 0,
        pin_memory: bool = False,
        turn: int = 0,
        turns: int = 1,
        encode: BatchEncoder | None = None,
    ) -> None:
        self.sampler = sampler
        self.reader = reader
        self._settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory, "encode": encode}
        self._turn = turn
        self._turns = turns
        self._loader: DataLoader[ReadPart] = DataLoader(
            _PartReader(reader),
            batch_size=None,
            sampler=_PartSampler(sampler, turn, turns, num_workers, reader),
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_unchanged,
        )

    def taking_turns(self, turn: int, turns: int) -> PlannedLoader:
        """Returns a loader of the batches ``turn``, ``turn + turns``, ``turn + 2 * turns``, … of the same sampler.

        Ranks that train on the same batches read them in turn.
        """
        return PlannedLoader(self.reader, self.sampler, turn=turn, turns=turns, **self._settings)

    def __len__(self) -> int:
        """Batches of the whole epoch: of one that is resumed, those that are done count too, as Lightning expects."""
        return len(range(self._turn, len(self.sampler), self._turns))

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that workers start at the first batch: Lightning makes the iterator before it sets the epoch.
        encode = self._settings["encode"]
        yield from self._batches() if encode is None else map(encode, self._batches())

    def _batches(self) -> Iterator[Batch]:
        pin = self._loader.pin_memory and torch.cuda.is_available()
        parts: list[ReadPart] = []
        for part in self._loader:
            parts.append(part)
            if part.part.is_last:
                batch = self.reader.together(parts, pin)
                del part, parts[:]  # while the batch is trained on, nothing else shall take memory
                yield batch
                del batch


class _PartSampler(Sampler[Part]):
    def __init__(
        self, sampler: PlannedSampler, turn: int, turns: int, num_workers: int, reader: MicroBatchReader
    ) -> None:
        self._sampler = sampler
        self._turn = turn
        self._turns = turns
        self._num_workers = num_workers
        self._reader = reader

    def __iter__(self) -> Iterator[Part]:
        own = islice(self._sampler, self._turn, None, self._turns)
        return in_parts(own, self._num_workers, self._reader.is_slow)


class _PartReader(Dataset[ReadPart]):
    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader

    def __getitem__(self, part: Part) -> ReadPart:
        return self._reader.read(part)


def _unchanged(part: Any) -> Any:
    return part
