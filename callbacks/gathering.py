"""Figures of all ranks in one place."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor


def gather_rows(trainer: pl.Trainer, rows: Tensor) -> Tensor:
    """Returns every rank's rows on the host, (ranks, *rows.shape); collective, and equal shapes on all ranks."""
    if trainer.world_size == 1:
        return rows[None]
    gathered = trainer.strategy.all_gather(rows.to(trainer.strategy.root_device))
    return gathered.cpu()
