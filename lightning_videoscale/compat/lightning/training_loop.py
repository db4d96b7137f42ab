"""Lightning's training loop: where a batch begins and an epoch ends, how long one is, and where data go on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.trainer.states import RunningStage

from lightning_videoscale.compat.lightning import LIGHTNING
from lightning_videoscale.compat.patching import Method, patch


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether the micro-batch under way is not the last of its optimizer step."""
    return bool(LIGHTNING.get(trainer.fit_loop, "_should_accumulate")())


def before_each_batch(trainer: pl.Trainer, function: Callable[[], None]) -> None:
    """Calls a function before the training loop turns to a batch; every hook comes when the batch is fetched."""
    loop: Any = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def turned(*args: Any) -> None:
        function()
        advance(*args)

    patch(loop, "advance", turned)


def at_end_of_epoch(trainer: pl.Trainer, function: Callable[[], None]) -> None:
    """Calls a function after the last batch of an epoch that is trained, before what comes then, such as validation."""
    loop: Any = trainer.fit_loop.epoch_loop
    advance, after = loop.advance, loop.on_advance_end

    def turned(*args: Any) -> None:
        try:
            advance(*args)
        except StopIteration:  # there is no further batch, or ``on_train_batch_start`` has returned -1
            function()
            raise

    def ended(*args: Any) -> None:
        if is_over := loop.done:
            function()
        after(*args)
        if not is_over and loop.done:  # a validation in the middle of the epoch has stopped it
            function()

    patch(loop, "advance", turned)
    patch(loop, "on_advance_end", ended)


class Begun(NamedTuple):
    """How far a rank has come: the epoch under way, and how many batches of it, and of the run, it has begun."""

    epoch: int
    of_epoch: int
    of_run: int


def batches_begun(trainer: pl.Trainer) -> Begun:
    """Returns how far this rank is. Between epochs, Lightning's counts of an epoch are those of the last one."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return Begun(trainer.current_epoch, progress.current.ready, progress.total.ready)


def logged_step(trainer: pl.Trainer) -> int:
    """Returns the number under which loggers have what ``self.log`` takes in the batch under way, or was last trained.

    Lightning counts batches that step, from 0, and adds one behind their hooks. ``global_step`` counts every optimizer,
    and in manual optimization it leaves out batches without a step.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    batches, stepped = loop.batch_progress.current, int(LIGHTNING.get(loop, "_batches_that_stepped"))
    return stepped if batches.started > batches.completed else stepped - 1


def waits_between_batches(trainer: pl.Trainer) -> list[Method]:
    """The methods in which ranks wait for rank 0 before every micro-batch; newer versions of Lightning have one."""
    loop, name = trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
    return [Method(loop, name)] if hasattr(loop, name) else []


def skip_waits_between_batches(trainer: pl.Trainer) -> None:
    """Leaves out what rank 0 tells the others before every micro-batch: whether it was asked to end.

    For a strategy whose ranks agree on that by themselves. Each would drain its device, and wait for rank 0 within a
    step too.
    """
    for loop, name in waits_between_batches(trainer):
        patch(loop, name, lambda: None)


def validate_together(trainer: pl.Trainer, broadcast: Callable[[bool], bool]) -> None:
    """Where ``val_check_interval`` is a time, has all ranks validate when rank 0 does: a collective after each batch.

    Lightning asks every rank's own clock: one would validate while others train, and all would wait forever.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    is_due = LIGHTNING.get(loop, "_should_check_val_fx")

    def agreed(data_fetcher: Any) -> bool:
        due = is_due(data_fetcher)
        return due if LIGHTNING.get(trainer, "_val_check_time_interval") is None else broadcast(due)

    patch(loop, "_should_check_val_fx", agreed)


def loaders_under_way(trainer: pl.Trainer) -> list[Any]:
    """Returns the loaders of the loop that runs, as those of a dict, one behind the other; none outside of loops."""
    loop = LIGHTNING.get(trainer, "_active_loop")
    combined = None if loop is None else LIGHTNING.get(loop, "_combined_loader")
    return [] if combined is None else list(combined.flattened)


def limited_batches(batches: int, limit: int | float | None) -> int:
    """Returns how many of so many batches ``limit_train_batches`` leaves, as Lightning counts."""
    parse = LIGHTNING.get("lightning.pytorch.trainer.connectors.data_connector", "_parse_num_batches")
    return int(parse(RunningStage.TRAINING, batches, limit))


def asks_for_training_loader(trainer: pl.Trainer) -> bool:
    """Whether the training loop has no loader to read yet, or turns to another; else one that is made is no loop's."""
    loop = trainer.fit_loop
    return LIGHTNING.get(loop, "_combined_loader") is None or bool(LIGHTNING.get(loop, "_should_reload_train_dl"))


def has_begun_epoch(trainer: pl.Trainer) -> bool:
    """Whether the loaders were told which epoch it is: one that is made from now on, in a hook, is not."""
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    return bool(epochs.ready > epochs.processed and not loop.restarting)


def forget_training_loader(trainer: pl.Trainer) -> None:
    """Makes a Trainer that has made its training loader already ask for another when training begins."""
    LIGHTNING.put(trainer.fit_loop, "_combined_loader", None)


def set_epoch_length(trainer: pl.Trainer, sampler: Any, batches: int) -> None:
    """Changes the length of the epoch under way, which the loop asks for only when it makes the loaders.

    Args:
        trainer: The Trainer, within an epoch or before one.
        sampler: Of the loader that has another length now. Others may be beside it, as in a dict.
        batches: How many of that loader are read at most.
    """
    loop: Any = trainer.fit_loop
    loaders = LIGHTNING.get(loop, "_combined_loader")
    for number, loader in enumerate(loaders.flattened):
        if len(loaders.flattened) == 1 or getattr(loader, "sampler", None) is sampler:
            loaders.limits[number] = batches  # in place: the iterator under way has the same list
    modes = LIGHTNING.get("lightning.pytorch.utilities.combined_loader", "_SUPPORTED_MODES")
    loop.max_batches = modes[LIGHTNING.get(loaders, "_mode")]["fn"](loaders.limits)
    LIGHTNING.get(loop, "_data_fetcher").length = loop.max_batches if math.isfinite(loop.max_batches) else None


def place_in_epoch(trainer: pl.Trainer, epoch: int, batches: int, total: int | None) -> None:
    """Brings the training loop to where the data go on, as if the run had not stopped.

    There is no public way: the loop's counters come from a checkpoint alone. Hooks of the last epoch's end, or a
    validation, that a checkpoint came before are not made up for, as Lightning does not either.

    Args:
        trainer: The Trainer, before or between epochs.
        epoch: Of the Trainer, counted from 0.
        batches: Of this epoch, that are trained.
        total: Batches that are trained in all epochs; None leaves the Trainer's own count.
    """
    loop: Any = trainer.fit_loop
    is_within = batches > 0
    for epochs in (loop.epoch_progress.total, loop.epoch_progress.current):
        epochs.ready = epochs.started = epoch + is_within
        epochs.processed = epochs.completed = epoch
    progress = loop.epoch_loop.batch_progress
    _count(progress.current, batches)
    _count(progress.total, progress.total.processed if total is None else total)
    progress.is_last_batch = False
    LIGHTNING.put(loop, "_restart_stage", RestartStage.RESTARTED_MID_EPOCH if is_within else RestartStage.NONE)
    loop.epoch_loop.reset_restart_stage()
    loop.epoch_loop.val_loop.reset_restart_stage()
    LIGHTNING.put(loop, "_restarting", is_within)
    loop.epoch_loop.restarting = is_within
    if trainer.lightning_module.automatic_optimization:
        # The loop adds one when it restarts within an epoch.
        LIGHTNING.put(loop.epoch_loop, "_batches_that_stepped", trainer.global_step - is_within)
    if is_within:
        _reset_quietly(loop.epoch_loop)


def _count(tracker: Any, events: int) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = events


def _reset_quietly(loop: Any) -> None:
    """Lets the loop begin once without a warning that data may repeat: it looks for a state in the loader alone."""

    def reset() -> None:
        undo()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            loop.reset()

    undo = patch(loop, "reset", reset)
