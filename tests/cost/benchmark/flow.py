"""A tiny Wan to benchmark, and one that is out of memory on purpose."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_videoscale.data.planning.shapes import ClipShape
from tests.models import tiny_wan

# Latents (F, H, W); with patches of (1, 2, 2) these are 4, 16, 48 and 80 tokens.
SHAPES = [ClipShape(1, 4, 4, True), ClipShape(1, 8, 8, True), ClipShape(3, 8, 8, True), ClipShape(5, 8, 8, True)]


class Flow(pl.LightningModule):
    """Rectified flow with AdamW, dropout, a schedule, a running mean in a buffer, a metric, and lines of logging."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = tiny_wan(num_layers=1)
        self.frozen = nn.Dropout().eval()
        self.norm = nn.BatchNorm3d(4)
        self.losses = nn.ModuleDict({"mean": MeanMetric()})
        self.batches: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.batches.append(batch)
        x = F.dropout(self.norm(batch["latents"].float()), 0.1)
        time = torch.rand(len(x), device=x.device)
        text = torch.zeros(len(x), 4, 16, device=x.device)
        loss = F.mse_loss(self.transformer(x, time * 1000, text).sample, torch.randn_like(x))
        self.losses["mean"].update(loss.detach())
        self.log("loss", loss)
        self.log("mean", self.losses["mean"], on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Small(Flow):
    """Has memory for so many tokens only.

    Args:
        tokens: B * S that fit.
        rank: The one rank that is so small; None: all.
        in_backward: Whether memory runs out in the backward pass.
    """

    def __init__(self, tokens: int, rank: int | None = None, in_backward: bool = False) -> None:
        super().__init__()
        self.tokens, self.rank, self.in_backward = tokens, rank, in_backward

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        tokens = batch["meta"].samples * batch["meta"].sequence_length
        is_full = tokens > self.tokens and self.rank in (None, self.global_rank)
        if is_full and not self.in_backward:
            _raise_out_of_memory()
        loss = super().training_step(batch, batch_idx)
        if is_full:
            loss.register_hook(_raise_out_of_memory)
        return loss


def _raise_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 1.00 TiB")
