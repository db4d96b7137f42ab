"""Which batches count in the means of `self.log`: `leave_out_of_means`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_videoscale.compat.lightning import LIGHTNING
from lightning_videoscale.compat.patching import patch


def leave_out_of_means(trainer: pl.Trainer, is_filler: Callable[[Any], bool]) -> None:
    """Has means over an epoch that a module logs leave out some batches, whatever ``batch_size=`` it gives.

    A mean over the ranks leaves all of them out. That of one rank takes one where it has nothing before, as it would be
    NaN without.

    Args:
        trainer: The Trainer, before the loop in question runs.
        is_filler: Whether the batch under way, which it is given, repeats samples that count elsewhere.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        results = LIGHTNING.get(loop, "_results")
        if "_extract_batch_size" not in vars(results):
            _leave_out(results, is_filler)


def _leave_out(results: Any, is_filler: Callable[[Any], bool]) -> None:
    extract = LIGHTNING.get(results, "_extract_batch_size")

    def size(metric: Any, batch_size: int | None, meta: Any) -> int:
        is_mean = meta.on_epoch and metric.is_tensor and meta.is_mean_reduction
        has_batch = results.batch is not None  # there is none at the end of an epoch
        if is_mean and has_batch and is_filler(results.batch) and (meta.sync.should or metric.cumulated_batch_size > 0):
            return 0
        return int(extract(metric, batch_size, meta))

    patch(results, "_extract_batch_size", size)
