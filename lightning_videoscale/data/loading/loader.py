"""A pass over the plan of an epoch, for one data-parallel rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_videoscale.data.encoding.online_encoder import BatchEncoder
from lightning_videoscale.data.loading.background import InBackground
from lightning_videoscale.data.loading.parts import BatchPart, ReadPart, in_parts
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.planning import BucketPlanner, EpochPlan, MicroBatch
from lightning_videoscale.data.planning.micro_batch import Batch


class PlannedSampler(DistributedSampler[MicroBatch]):
    """The micro-batches of one data-parallel rank, in the order of the plan.

    Of a `DistributedSampler` it has the place among the ranks; what is dealt out to them, the plan says. Lightning and
    Fabric put one of theirs around any other sampler, which would deal out this rank's part once more.

    Args:
        planner: Makes the plan of an epoch.
        dp_rank: Whose part of it.
        repeat_first_epoch: Whether every epoch uses the plan of the first (to overfit, to validate).
        progress: Where the first pass begins, whatever epoch `set_epoch` is told; None: at the beginning of an epoch.
        epoch: Which one.
        on_begin: Called with where a pass begins, before each. None: nobody will ask for a state of what was trained
            before the window that is read.

    Attributes:
        planner: Makes the plan of an epoch.
        num_replicas: Data-parallel ranks that it is planned for.
        rank: Which of them this is.
        sharing: Processes of such a rank, which train on one batch together; 1 until `PlannedLoader.taking_turns`.
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
        # Without super().__init__(), which wants a dataset to cut.
        self.planner = planner
        self.num_replicas, self.rank, self.sharing = planner.dp_size, dp_rank, 1
        self._repeat_first_epoch = repeat_first_epoch
        self._on_begin = on_begin
        self.is_started = False
        self._goes_on = progress is not None
        self._ahead: tuple[Progress, InBackground[Progress]] | None = None  # the next window, by what it follows
        self._pass: object | None = None  # that of this epoch, unless it was left before its end
        self._begin(Progress.start(planner, 0 if repeat_first_epoch else epoch) if progress is None else progress)

    @property
    def progress(self) -> Progress:
        """Where the run stood when this pass began, or the latest plan since: after `replan`, or of a window."""
        return self._parts[-1]

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch or of its current window, or of what was left of either."""
        return self.progress.plan

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next pass; Lightning calls this before each."""
        self.is_started, self._pass = False, None
        if self._repeat_first_epoch:
            self._begin(self._start)
            return
        passes = epoch - self.progress.trained_as
        if passes and not self._goes_on:
            self._begin(Progress.start(self.planner, self.progress.epoch + passes, epoch))
        else:
            self._begin(self._start)
        if self._on_begin is not None:
            self._on_begin(self.progress)

    def replan(self, planner: BucketPlanner, taken: int) -> None:
        """Plans by another planner from now on: the rest of this pass, and the next ones.

        Args:
            planner: Makes the plans, for as many ranks and micro-batches.
            taken: Micro-batches of this epoch that any rank has taken: the steps that they belong to stay.
        """
        self._plan_up_to(taken)  # as all were planned before: another rank may have begun to read the next window
        self.planner, self._ahead = planner, None
        rest = self.progress.replan(planner, taken)
        if rest is None:
            return
        if not self.is_started and taken <= self._start.done:  # nor has any other rank begun
            self._begin(rest)
        elif rest.counted == self.progress.counted:  # what was to come after these steps never began
            self._parts[-1] = rest
        else:
            self._parts.append(rest)

    def reach(self, micro_batches: int) -> Progress:
        """Says that each rank has trained so many micro-batches of this epoch.

        Parts before may be forgotten, unless this rank has yet to read its way through them to its next turn.

        Returns:
            The place where the latest plan of the window begins that the next micro-batch is of, the same on all ranks
            whatever they have read ahead.
        """
        self._plan_up_to(micro_batches)
        window = self._part_of(micro_batches).plan.window
        if micro_batches >= self.taken + self.sharing:  # its turn is over, and another rank reads for this one
            self._reading = micro_batches
        self._forget(micro_batches)
        return [part for part in self._parts if part.plan.window is window][-1]

    def state_dict(
        self, micro_batches: int, is_over: bool = False, has_ended: bool = False, repeats: bool = False
    ) -> dict[str, Any]:
        """Returns the state of the epoch after a number of micro-batches, see `Progress.state_dict`."""
        return self._part_of(micro_batches).state_dict(micro_batches, is_over, has_ended, repeats)

    def __iter__(self) -> Iterator[MicroBatch]:
        """The epoch, or what is left of it; where another pass over it is under way or over, all of it beside that one.

        Of such a pass nothing counts as taken: somebody looks at a batch, or reads a short epoch again beside a longer
        loader.
        """
        if self._pass is not None:
            yield from self._again()._read()
            return
        if self.is_started:
            self._begin(self._start)
        self.is_started, self._goes_on = True, False
        self._pass = own = object()
        try:
            yield from self._read()
        except GeneratorExit:
            # Who reads in turn never asks for what lies behind its last turn, and has read all the same.
            if self._pass is own and not (self.plan.ends_epoch and self.taken + self.sharing > len(self)):
                self._pass = None  # it was left before its end, and the next one is the epoch's
            raise

    def _again(self) -> PlannedSampler:
        """One that reads the epoch from its beginning, and that nobody asks what was trained."""
        start, other = self._start, copy.copy(self)
        is_whole = start.begun is None and not start.counted
        whole = replace(start, steps=0) if is_whole else Progress.start(self.planner, start.epoch, start.trained_as)
        other._on_begin, other._ahead = None, None
        other._begin(whole)
        return other

    def _read(self) -> Iterator[MicroBatch]:
        progress: Progress | None = self._parts[0]
        while progress is not None:
            self._enter(progress)
            for micro_batch in progress.plan.micro_batches_of(self.rank, progress.done - progress.counted):
                following = self._after(progress)  # may be added meanwhile
                if following is not None and self.taken == following.counted:
                    break
                self.taken += 1
                yield micro_batch
            following = self._after(progress)
            if following is None and not progress.plan.ends_epoch:
                following = self._enter_next_window()
            progress = following

    def __len__(self) -> int:
        return len(self.progress)

    def _enter(self, progress: Progress) -> None:
        """Begins to read a part, which begins where the one before has ended."""
        if self.taken != progress.done:
            raise RuntimeError(
                f"This rank goes on to read behind micro-batch {progress.done} and has read up to {self.taken}: what "
                "is between would be lost. Ranks that read in turn do so by loader.taking_turns(turn, turns)."
            )
        self._reading = progress.counted
        if self._on_begin is None:
            self._forget(progress.counted)
        self._plan_ahead(progress)

    def _begin(self, progress: Progress) -> None:
        self._start: Progress = progress
        self._parts: list[Progress] = [progress]
        self.taken = progress.done
        self._reading = progress.counted  # micro-batches before the part that this rank reads

    def _part_of(self, micro_batches: int) -> Progress:
        """The part of the micro-batch with this number; the first, if that is of an earlier one."""
        return [part for part in self._parts if part.counted <= micro_batches or part is self._parts[0]][-1]

    def _forget(self, micro_batches: int) -> None:
        """Drops the parts that end before a micro-batch, up to the one that this rank reads."""
        first = self._part_of(min(micro_batches, self._reading))
        self._parts = [part for part in self._parts if part.counted >= first.counted]

    def _after(self, progress: Progress) -> Progress | None:
        """The part that follows one, if it is known yet."""
        return next((part for part in self._parts if part.counted > progress.counted), None)

    def _plan_ahead(self, progress: Progress) -> None:
        """Begins to plan the window behind the last part, unless that has begun or there is none."""
        if progress is self.progress and not progress.plan.ends_epoch:
            make = partial(progress.next_window, self.planner)
            self._ahead = progress, InBackground(make, "The plan of the next window")

    def _plan_up_to(self, micro_batches: int) -> None:
        """Adds windows until one holds the micro-batch with this number, counted from 0."""
        while self.progress.end <= micro_batches and not self.plan.ends_epoch:
            self._enter_next_window()

    def _enter_next_window(self) -> Progress:
        """Adds the window behind the last part, as it was planned ahead if nothing has changed since."""
        last, ahead = self.progress, self._ahead
        self._ahead = None
        is_valid = ahead is not None and ahead[0] is last
        following = ahead[1].result() if ahead and is_valid else last.next_window(self.planner)
        self._parts.append(following)
        return following


class PlannedLoader:
    """Batches of one data-parallel rank; iterating it is one epoch, or what is left of one.

    It wraps a DataLoader rather than being one: Lightning would put a sampler of its own into a DataLoader to overfit,
    and a DataLoader reads no micro-batch in parts.

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
            ``DataLoader(loader.reader, batch_size=None, sampler=loader.sampler)``, or webdataset's ``WebLoader``. On
            any number of ranks each reads its own; ``Trainer(overfit_batches=...)`` needs this loader itself.
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
        self.sampler.sharing = turns
        return PlannedLoader(self.reader, self.sampler, turn=turn, turns=turns, **self._settings)

    def __len__(self) -> int:
        """Batches of the whole epoch: of one that is resumed, those that are done count too, as Lightning expects."""
        return len(range(self._turn, len(self.sampler), self._turns))

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that workers start at the first batch: Lightning makes the iterator before it sets the epoch.
        encode = self._settings["encode"]
        yield from self._batches() if encode is None else map(encode, self._batches())

    def _batches(self) -> Iterator[Batch]:
        pin = self._settings["pin_memory"] and torch.cuda.is_available()
        parts: list[ReadPart] = []
        for part in self._parts():
            parts.append(part)
            if part.part.is_last:
                batch = self.reader.together(parts, pin)
                del part, parts[:]  # while the batch is trained on, nothing else shall take memory
                yield batch
                del batch

    def _parts(self) -> Iterator[ReadPart]:
        others = active_children()
        parts = iter(self._loader)
        workers = [child for child in active_children() if child not in others]
        try:
            yield from parts
        except (OSError, EOFError) as error:
            # Of a worker that is killed while it hands a part over, torch may see a lost connection before its end.
            ended = _ended_of(workers, seconds=1)
            if not ended:
                raise
            raise RuntimeError(
                f"DataLoader worker (pid {ended}) exited while it handed over what it had read. A negative exit code "
                "is the number of a signal: -9 often says that the host is short of memory; take fewer workers then."
            ) from error


def _ended_of(workers: list[BaseProcess], seconds: float) -> str:
    closed = wait([worker.sentinel for worker in workers], seconds) if workers else []
    ended = [worker for worker in workers if worker.sentinel in closed]
    for worker in ended:
        worker.join(seconds)  # its files are closed a moment before it has ended
    return ", ".join(f"{worker.pid}, exit code {worker.exitcode}" for worker in ended if worker.exitcode)


class _PartSampler(Sampler[BatchPart]):
    def __init__(
        self, sampler: PlannedSampler, turn: int, turns: int, num_workers: int, reader: MicroBatchReader
    ) -> None:
        self._sampler = sampler
        self._turn = turn
        self._turns = turns
        self._num_workers = num_workers
        self._reader = reader

    def __iter__(self) -> Iterator[BatchPart]:
        own = islice(self._sampler, self._turn, None, self._turns)
        return in_parts(own, self._num_workers, self._reader.is_slow)


class _PartReader(Dataset[ReadPart]):
    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader

    def __getitem__(self, part: BatchPart) -> ReadPart:
        return self._reader.read(part)


def _unchanged(part: Any) -> Any:
    return part
