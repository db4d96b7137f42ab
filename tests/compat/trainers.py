"""Trainers that do little and say nothing, and what watches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader


class Recorder(pl.Callback):
    """Calls a function at the start of every training batch, and keeps what it returns."""

    def __init__(self, call: Callable[[pl.Trainer, int], Any]) -> None:
        self.call = call
        self.returned: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.returned.append(self.call(trainer, index))


class Model(BoringModel):
    """Adds to batches what its hooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(6, 32), batch_size=1)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 10


def trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "limit_val_batches": 0, "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **(quiet | kwargs))
