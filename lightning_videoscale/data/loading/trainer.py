"""All that the data ask of a Trainer, and all that they change in one.

It says how many micro-batches make a step. What is changed in it: callbacks are added, one that follows the windows of
an epoch and one where nothing else weighs the loss. Loaders are made anew every epoch where epochs differ in length.
The loops are told where in the epoch they stand and how long it is.

What counts as trained is what the weights have seen: the optimizer steps since the pass over the epoch began. Lightning
counts batches too, and ``every_n_train_steps``, a validation, the end of an epoch or an exception leave its counters in
as many states, of which it goes on in as many ways. So they are never read back from a checkpoint: whenever a pass
begins, the Trainer is told where it is, and from then on both counts must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.compat.lightning import first_place
from lightning_videoscale.compat.lightning.training_loop import (
    has_begun_epoch,
    limited_batches,
    place_in_epoch,
    set_epoch_length,
)
from lightning_videoscale.data.loading.consistency import check_same_plan
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.loading.loss_weighting import LossWeighting
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.topology import ExpectsShapes, topology_of

_Callback = TypeVar("_Callback", bound=pl.Callback)


def rank_and_size(trainer: pl.Trainer | None) -> tuple[int, int]:
    """This process's data-parallel rank, and how many there are; without a Trainer, the only one."""
    if trainer is None:
        return 0, 1
    topology = topology_of(trainer)
    return topology.data_parallel_rank, topology.data_parallel_size


def running(trainer: pl.Trainer | None) -> pl.Trainer | None:
    """The Trainer, if it fits or evaluates just now; None between its runs, where whoever calls does so by hand."""
    return trainer if trainer is not None and trainer.state.status == TrainerStatus.RUNNING else None


def micro_batches_of(trainer: pl.Trainer | None, planned: int | None) -> int:
    """Micro-batches of an optimizer step and rank, by the Trainer's ``accumulate_grad_batches``.

    Args:
        trainer: The Trainer; without one, the number is what was asked for, or 1.
        planned: How many were asked for; None: as many as the Trainer accumulates.

    Raises:
        ValueError: If the Trainer accumulates another number, or a number that changes, or searches for a batch size.
            The message names the fix.
    """
    if trainer is None:
        return 1 if planned is None else planned
    _refuse_search_for_batch_size(trainer)
    accumulated = int(trainer.accumulate_grad_batches)
    if not trainer.lightning_module.automatic_optimization:
        return accumulated if planned is None else planned
    if planned not in (None, accumulated):
        raise ValueError(
            f"VideoDataModule(micro_batches={planned}) plans optimizer steps of {planned} micro-batches "
            f"and the Trainer makes them of {accumulated}: set "
            f"Trainer(accumulate_grad_batches={planned}), or leave micro_batches out."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in _callbacks(trainer)):
        raise ValueError(
            "GradientAccumulationScheduler changes the micro-batches per step, and the plan does not: leave it out, "
            "and give Trainer(accumulate_grad_batches=...). A run that goes on may have another number."
        )
    return accumulated


def _refuse_search_for_batch_size(trainer: pl.Trainer) -> None:
    finders = [callback for callback in _callbacks(trainer) if isinstance(callback, BatchSizeFinder)]
    if any(type(finder).on_fit_start is BatchSizeFinder.on_fit_start for finder in finders):
        raise ValueError(
            "BatchSizeFinder, and Tuner.scale_batch_size, try values of batch_size, by which VideoDataModule makes no "
            "batches: leave them out. What a micro-batch may take is its budget, and budget='auto', the default, finds "
            "it when fit begins."
        )


def apply_loss_weights(trainer: pl.Trainer) -> None:
    """Sees to it that the weights of batches count: adds the callback that applies them, where nothing else would.

    Also where the plan gives all batches the same weight: that of a sample that cannot be read is zero.
    """
    applied = topology_of(trainer).applies_loss_weight or any(
        getattr(callback, "applies_loss_weight", False) for callback in _callbacks(trainer)
    )
    if not applied:
        _callbacks(trainer).append(LossWeighting())
        rank_zero_info(
            f"{type(trainer.strategy).__name__} does not apply meta.loss_weight; VideoDataModule adds the callback "
            "LossWeighting, which does."
        )


def first_callback(trainer: pl.Trainer, kind: type[_Callback]) -> _Callback:
    """The callback of a kind that a Trainer has; where it has none, one is put before all others.

    Who saves a checkpoint comes after, and finds the same place in the epoch on all ranks.
    """
    callbacks = _callbacks(trainer)
    found = next((callback for callback in callbacks if isinstance(callback, kind)), None)
    if found is None:
        found = kind()
        callbacks.insert(first_place(trainer), found)
    return found


def announce_shapes(trainer: pl.Trainer, sampler: PlannedSampler) -> None:
    """Tells the strategy, where it asks, how often shapes come in the run, by one epoch's sampler."""
    plan = sampler.plan
    if not isinstance(trainer.strategy, ExpectsShapes) or not plan.grid.size:
        return
    planned = plan.steps * sampler.planner.micro_batches
    trained = epoch_length(trainer, planned if plan.ends_epoch else len(sampler))
    lengths = [trainer.max_steps * sampler.planner.micro_batches] if trainer.max_steps >= 0 else []
    lengths += [trainer.max_epochs * trained] if trainer.max_epochs is not None and trainer.max_epochs >= 0 else []
    trainer.strategy.expect_shapes(max(1.0, plan.micro_batches_per_shape * min(lengths, default=math.inf) / planned))


def reload_every_epoch(trainer: pl.Trainer) -> None:
    """Has the Trainer ask for a loader at the beginning of every epoch: it asks for an epoch's length only then."""
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # set by a connector


class Trained(NamedTuple):
    """What a Trainer has trained of an epoch.

    Attributes:
        micro_batches: Per rank, of whole optimizer steps.
        total: Likewise, of all epochs.
        is_over: Whether nothing of the epoch is to come: all is trained, or as much as ``limit_train_batches`` allows.
        has_ended: Whether the Trainer takes the epoch for complete, be it over or cut short by ``max_steps``.
        repeats: Whether all of the epoch is trained and the Trainer's goes on, by a longer loader beside this one.
    """

    micro_batches: int
    total: int
    is_over: bool = False
    has_ended: bool = False
    repeats: bool = False


class TrainerPosition:
    """Counts what a Trainer trains of the current epoch, and tells it where a pass begins.

    Args:
        trainer: The Trainer.
        total: Micro-batches that were trained before this pass, in all epochs; None: as many as the Trainer says.
    """

    def __init__(self, trainer: pl.Trainer, total: int | None = None) -> None:
        self.trainer = trainer
        self._total = total
        self._begun: Progress | None = None
        self._first_step = 0

    @property
    def has_begun(self) -> bool:
        """Whether a pass has: the Trainer's loop reads the sampler of this position."""
        return self._begun is not None

    def begin(self, progress: Progress) -> None:
        """Tells the Trainer where a pass over an epoch begins, unless it does not train now."""
        if not self.trainer.training:
            return
        if self._total is None and not progress.done and self.trainer.fit_loop.restarted_mid_epoch:
            rank_zero_warn(
                f"The checkpoint was saved within epoch {self.trainer.current_epoch} and no state of VideoDataModule "
                "came with it: what was trained of the epoch is trained again. A DataModule that holds others has to "
                "save theirs: return {name: data.state_dict(), ...} in its state_dict, and in its load_state_dict set "
                "data.trainer = self.trainer and call data.load_state_dict(...) of each."
            )
        self._note(progress)
        place_in_epoch(self.trainer, progress.trained_as, progress.done, self._total)
        self._total = None

    def join(self, progress: Progress) -> None:
        """Begins a pass if the Trainer has begun its epoch: a search for a learning rate makes loaders in hooks."""
        if self.trainer.training and has_begun_epoch(self.trainer):
            self._note(progress)

    def _note(self, progress: Progress) -> None:
        self._begun, self._first_step = progress, self.trainer.global_step

    def now(self, sampler: PlannedSampler) -> Trained:
        """What is trained of the sampler's epoch.

        Raises:
            RuntimeError: If the Trainer counts otherwise, or never told the sampler which epoch it trains.
        """
        loop: Any = self.trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        if self._begun is None:
            if sampler.is_started:
                raise RuntimeError(
                    "A pass over the epoch began and the sampler was not told which: the loader around that of "
                    "VideoDataModule hides it from Lightning. Give it the attribute `sampler`."
                )
            return Trained(sampler.progress.done, batches.total.processed if self._total is None else self._total)
        begun, k = self._begun, self._begun.micro_batches
        trained = batches.current.processed
        if self.trainer.lightning_module.automatic_optimization:  # else any number of optimizers steps at any time
            steps = self.trainer.global_step - self._first_step
            ahead = batches.current.ready - (begun.done + steps * k)
            # `limit_train_batches` may make the last step of an epoch a shorter one.
            if not (-k if batches.is_last_batch else -1) < ahead <= k:
                raise RuntimeError(
                    f"Epoch {begun.trained_as} began at micro-batch {begun.done} and {steps} optimizer steps of {k} "
                    f"were made since, but the Trainer's loop stands at micro-batch {batches.current.ready}. Which "
                    "samples were trained cannot be told: something else has changed the loop's counters, or how many "
                    "micro-batches it accumulates."
                )
            trained = begun.done + steps * k + min(ahead, 0)
        has_ended = loop.epoch_progress.current.processed > begun.trained_as
        is_over = trained >= loop.max_batches or (has_ended and batches.is_last_batch)
        total = batches.total.processed - max(batches.current.processed - trained, 0)
        repeats = len(sampler) <= trained < loop.max_batches and not has_ended
        return Trained(trained, total, is_over, has_ended, repeats)


def resumed(trainer: pl.Trainer, planner: BucketPlanner, state: Mapping[str, Any]) -> Progress:
    """Where a run goes on from a state: `Progress.resume`, within what the Trainer trains of an epoch."""
    progress = Progress.resume(planner, state)
    if progress.done and progress.done >= epoch_length(trainer, len(progress)):  # the limit is another one now
        return Progress.start(planner, progress.epoch + 1, progress.trained_as + 1)
    return progress


def epoch_length(trainer: pl.Trainer, micro_batches: int) -> int:
    """How many of an epoch's micro-batches a Trainer trains on, which may limit them."""
    limit: Any = trainer.limit_train_batches
    return limited_batches(micro_batches, limit)


def replan(trainer: pl.Trainer, sampler: PlannedSampler, planner: BucketPlanner) -> None:
    """Plans the rest of the epoch by another planner; collective over all ranks.

    Ranks read ahead, each a little differently. A new plan begins with the first step that no rank has begun to read,
    so that every rank trains both plans' steps whole, and every sample of the epoch exactly once.

    Raises:
        ValueError: On every rank, if any has planned another plan than rank 0.
    """
    taken = torch.tensor(sampler.taken, device=trainer.strategy.root_device)
    sampler.replan(planner, int(trainer.strategy.all_gather(taken).max()))
    check_same_plan(trainer, sampler.plan.digest)
    tell_length(trainer, sampler, len(sampler))


def tell_length(trainer: pl.Trainer, sampler: PlannedSampler, micro_batches: int) -> None:
    """Tells a Trainer that the epoch of a sampler has another length; on all ranks at the same micro-batch.

    An epoch whose last batch is trained ends with it: `limit_train_batches` may leave a step of it that is a short one.
    """
    loop: Any = trainer.fit_loop
    if has_begun_epoch(trainer) and loop.epoch_loop.batch_progress.is_last_batch:
        return
    set_epoch_length(trainer, sampler, epoch_length(trainer, micro_batches))
    # Of an interval in seconds, a Trainer has neither.
    is_share = trainer.val_check_batch is not None and isinstance(trainer.val_check_interval, float)
    if is_share and math.isfinite(loop.max_batches):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
