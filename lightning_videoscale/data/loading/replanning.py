"""A new plan in the middle of an epoch: from which step on, and how the Trainer learns that the epoch's length changed.

Ranks read ahead, each a little differently. A new plan begins with the first step that no rank has begun to read, so
that every rank trains both plans' steps whole, and every sample of the epoch exactly once.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_videoscale.data.loading.consistency import check_same_plan
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.loading.trainer import epoch_length
from lightning_videoscale.data.planning import BucketPlanner


def replan(trainer: pl.Trainer, sampler: PlannedSampler, planner: BucketPlanner) -> None:
    """Plans the rest of the epoch by another planner; collective over all ranks.

    Args:
        trainer: The Trainer that trains on the sampler's micro-batches.
        sampler: Of this rank.
        planner: Equal on all ranks.

    Raises:
        ValueError: On every rank, if any has planned another plan than rank 0.
    """
    sampler.replan(planner, _most(trainer, sampler.taken))
    check_same_plan(trainer, sampler.plan.digest)
    _set_length(trainer, len(sampler))


def _most(trainer: pl.Trainer, count: int) -> int:
    """The largest count of any rank."""
    if trainer.world_size == 1:
        return count
    mine = torch.tensor(count, device=trainer.strategy.root_device)
    return int(trainer.strategy.all_gather(mine).max())


def _set_length(trainer: pl.Trainer, micro_batches: int) -> None:
    """Tells the training loop, which asks for an epoch's length only when it makes the loader."""
    loop: Any = trainer.fit_loop
    length = epoch_length(trainer, micro_batches)
    loop.max_batches = length
    loop._combined_loader.limits[:] = [length]  # in place: the iterator under way has the same list
    loop._data_fetcher.length = length
    interval: Any = trainer.val_check_interval
    if isinstance(interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(length * interval))
