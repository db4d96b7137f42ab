"""The losses that a rank's training steps returned, added up until a window of steps takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.timing import load_of


class StepLosses:
    """Keeps losses on their device, and reads them together: a GPU is waited for once per window.

    A loss is a mean over the samples of its micro-batch, so that it counts as often as there are samples; of batches
    that do not tell how many, every one counts once. Fillers repeat samples and are left out.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, outputs: Any, batch: Any, accumulated: int) -> None:
        """Takes what Lightning hands to ``on_train_batch_end``; leaves alone what holds no single loss.

        Args:
            outputs: Of ``training_step``; Lightning divides the loss by the accumulated micro-batches.
            batch: The micro-batch.
            accumulated: The Trainer's ``accumulate_grad_batches``.
        """
        loss, load = outputs.get("loss") if isinstance(outputs, Mapping) else None, load_of(batch)
        weight = 1.0 if load is None else float(load.samples if load.loss_weight else 0)
        if isinstance(loss, Tensor) and loss.numel() == 1 and weight:
            self._losses.append(loss.detach().reshape(()).double() * accumulated)
            self._weights.append(weight)

    def take(self) -> tuple[float, float]:
        """Returns the sum of the weighted losses and that of their weights since the last call."""
        losses, weights, self._losses, self._weights = self._losses, self._weights, [], []
        if not losses:
            return 0.0, 0.0
        return float(torch.stack(losses).cpu() @ torch.tensor(weights, dtype=torch.float64)), sum(weights)
