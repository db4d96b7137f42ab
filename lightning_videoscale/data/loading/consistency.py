"""Where the data and the Trainer must agree: accumulation, loss weights, one plan."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from lightning_videoscale.data.loading.loss_weighting import LossWeighting
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.location import short_names
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


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
