"""Where the data and the Trainer must agree: accumulation, loss weights, one plan, the counters on resume."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from lightning_videoscale.data.index import ShardIndex
from lightning_videoscale.data.loss_weighting import LossWeighting
from lightning_videoscale.data.progress import epoch_of_trainer
from lightning_videoscale.data.shards import short_names
from lightning_videoscale.topology import topology_of


def check_accumulation(trainer: pl.Trainer, micro_batches: int) -> None:
    """Raises ValueError, with the fix, where the Trainer accumulates another number of micro-batches than planned."""
    if not trainer.lightning_module.automatic_optimization:
        return
    if trainer.accumulate_grad_batches != micro_batches:
        raise ValueError(
            f"VideoDataModule(micro_batches={micro_batches}) plans optimizer steps of {micro_batches} micro-batches "
            f"and the Trainer makes them of {trainer.accumulate_grad_batches}: set "
            f"Trainer(accumulate_grad_batches={micro_batches}), or micro_batches to the Trainer's number."
        )
    if any(type(callback) is GradientAccumulationScheduler for callback in _callbacks(trainer)):
        raise ValueError("GradientAccumulationScheduler changes the micro-batches per step, and the plan does not.")


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


def check_same_plan(trainer: pl.Trainer, digest: str) -> None:
    """Raises ValueError on every rank if any has another plan than rank 0."""
    same = trainer.strategy.broadcast(digest) == digest
    if not trainer.strategy.reduce_boolean_decision(same, all=True):
        raise ValueError(
            f"The ranks do not see the same shards: rank {trainer.global_rank} planned {digest[:12]}, which "
            f"{'equals' if same else 'differs from'} rank 0's plan. Compare the shards on all nodes."
        )


def contents_of(index: ShardIndex) -> dict[str, str]:
    """What each shard of an index holds, as a hash under the shard's short name."""
    names = short_names([shard.url for shard in index.shards])
    return {name: ShardIndex((shard,)).digest for name, shard in zip(names, index.shards, strict=True)}


def check_same_index(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises ValueError, naming the difference, if the shards are not those that an epoch was begun with."""
    if before == now:
        return
    kinds = {
        "gone": sorted(before.keys() - now.keys()),
        "new": sorted(now.keys() - before.keys()),
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
    }
    listed = "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
        if names
    )
    raise ValueError(
        f"The epoch was begun with other shards ({listed or 'in another order'}): which of their samples are done "
        "with cannot be told any more. Bring the shards back, or start a new run from the weights."
    )


def is_left(state: Mapping[str, Any], trainer: pl.Trainer | None) -> bool:
    """Whether a run goes on within the epoch of a state, which the Trainer may have ended.

    ``max_steps`` and ``max_time`` cut it short; ``limit_train_batches`` makes it a shorter one, of which nothing is
    left.
    """
    if trainer is None or trainer.current_epoch < epoch_of_trainer(state):
        return True
    return _was_cut_short(trainer)


def has_cut_epoch(trainer: pl.Trainer | None, epoch: int) -> bool:
    """Whether a Trainer that fits again had stopped within an epoch, by its own count, and will go on with the next.

    A plain loader's rest would be lost then. Another Trainer, or one whose epoch was broken off by an exception, begins
    anew.
    """
    return trainer is not None and trainer.current_epoch == epoch + 1 and _was_cut_short(trainer)


def _was_cut_short(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's last epoch ended before its loader did."""
    is_whole: bool = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return not is_whole


def align_counters(trainer: pl.Trainer, micro_batches: int) -> None:
    """Brings the Trainer's count of this epoch's micro-batches to where the plan goes on.

    They differ if the checkpoint was saved within a step, whose gradients are lost, so that it is repeated; or if a
    step has more or fewer micro-batches now.
    """
    count: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = micro_batches - count.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(count, name, getattr(count, name) + shift)
    # The data does go on where it was; Lightning looks for a state in the loader, and ours is in the DataModule.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
