"""A model that learns nothing and remembers what it saw, and a quiet Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_videoscale.data import Batch


class Witness(pl.LightningModule):
    """loss = mean((slope * mean of the sample's latents - 1)²), in float64.

    Attributes:
        batches: Per epoch, the sample ids of every training batch.
        validated: Likewise, of every validation pass.
        metas: `meta` of every training batch.
        gradients: Gradient of the slope at every step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.batches: dict[int, list[list[str]]] = {}
        self.validated: list[list[list[str]]] = []
        self.metas: list[Any] = []
        self.gradients: list[float] = []
        self.log_kwargs: dict[str, Any] = {}

    def loss(self, batch: Batch) -> Tensor:
        x = batch["latents"].double().mean(dim=(1, 2, 3, 4)) / 100
        return ((self.slope * x - 1) ** 2).mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.batches.setdefault(self.current_epoch, []).append(batch["sample_ids"])
        self.metas.append(batch["meta"])
        loss = self.loss(batch)
        self.log("loss", loss, **self.log_kwargs)
        return loss

    def on_validation_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated[-1].append(batch["sample_ids"])
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.slope.grad is not None
        self.gradients.append(self.slope.grad.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer_with(**kwargs: Any) -> pl.Trainer:
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_model_summary": False, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**(settings | quiet | kwargs))
