"""Applies `meta.loss_weight` under strategies that know nothing of it (plain DDP, DeepSpeed, a single device)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_videoscale.timing import load_of
from lightning_videoscale.topology import topology_of


class LossWeighting(pl.Callback):
    """Scales the gradient of each micro-batch's loss by ``batch["meta"].loss_weight``.

    Buckets have different batch sizes, and averaging per-rank means would count the samples of small batches too often;
    `VideoDataModule` computes the weight that puts this right. Only the gradient is scaled: the loss that the module
    returns and logs stays the mean over its own batch.

    Our own strategies weigh the loss themselves. Under them this callback says so and does nothing, so that the same
    configuration runs under any strategy and the weight never counts twice.
    """

    applies_loss_weight = True
    """Tells `VideoDataModule` that its weights are heeded, as the property of this name does on our strategies."""

    def __init__(self) -> None:
        self._strategy_applies_it = False
        self._weight = 1.0
        self._said_missing = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds out whether the strategy applies the weight itself."""
        self._strategy_applies_it = topology_of(trainer).applies_loss_weight
        if self._strategy_applies_it:
            rank_zero_warn(
                f"{type(trainer.strategy).__name__} applies meta.loss_weight itself: LossWeighting does nothing here."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remembers the weight of the coming micro-batch."""
        load = load_of(batch)
        if load is None and not self._said_missing:
            self._said_missing = True
            rank_zero_warn(
                "LossWeighting found no `meta` with samples, sequence_length and loss_weight in the batch "
                "(VideoDataModule adds it): the loss of such batches is left as it is."
            )
        self._weight = 1.0 if load is None else load.loss_weight

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Makes the backward pass start from the weight instead of 1."""
        if not self._strategy_applies_it and self._weight != 1.0:
            weight = self._weight
            loss.register_hook(lambda gradient: gradient * weight)
