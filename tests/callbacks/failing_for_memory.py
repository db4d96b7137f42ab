"""Training on a device that holds few tokens: `python -m tests.callbacks.failing_for_memory shards folder ddp`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.callbacks import BudgetRecalibrator
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from tests.data.training import Witness, trainer_with

BUDGET = BucketBudget(m_mem=320, m_comp=320 * 80)
HELD = 300
"""Tokens that the last rank can hold."""


class Overflowing(Witness):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        meta = batch["meta"]
        last = self.global_rank == self.trainer.world_size - 1
        if last and self.global_step > 1 and meta.samples * meta.sequence_length > HELD:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


def train(shards: str, folder: str, strategy: str, resume: str | None = None, devices: int = 2) -> dict[str, Any]:
    """Trains an epoch, saving every step."""
    module, recalibrator = Overflowing(), BudgetRecalibrator(every_n_steps=5)
    built: Any = SequenceParallelDDPStrategy(ulysses_size=1) if strategy == "sequence_parallel" else strategy
    callbacks: list[pl.Callback] = [recalibrator, ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)]
    trainer_with(strategy=built, devices=devices, callbacks=callbacks, enable_checkpointing=True).fit(
        module, VideoDataModule(shards, budget=BUDGET), ckpt_path=resume
    )
    assert recalibrator.calibration is not None
    return {
        "tokens": [meta.samples * meta.sequence_length for meta in module.metas],
        "history": recalibrator.history,
        "m_mem": recalibrator.calibration.budget.m_mem,
    }


if __name__ == "__main__":
    train(sys.argv[1], str(Path(sys.argv[2])), sys.argv[3])
