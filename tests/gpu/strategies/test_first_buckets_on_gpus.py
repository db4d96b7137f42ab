"""DDP makes its buckets anew in the second step, which takes no more memory than those after it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_videoscale as vs
from tests.data.training import trainer_with

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 2048, 8
GRADIENTS = 4 * LAYERS * (WIDTH + 1) * WIDTH  # bytes


class Wide(pl.LightningModule):
    """Its gradients are large, and its activations small, so that the host is far ahead of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, _: Any) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_after_backward(self) -> None:
        self.peaks.append(torch.cuda.max_memory_allocated())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_second_step_takes_no_more_than_those_after_it(micro_batches: int) -> None:
    module = Wide()
    strategy = vs.SequenceParallelDDPStrategy(1, graphs=False)
    trainer_with(
        accelerator="cuda", devices=1, strategy=strategy, max_steps=4, accumulate_grad_batches=micro_batches
    ).fit(module, DataLoader([torch.randn(4096, WIDTH)] * 4 * micro_batches, batch_size=None))
    steps = [max(module.peaks[i : i + micro_batches]) for i in range(0, 4 * micro_batches, micro_batches)]
    assert steps[1] == pytest.approx(steps[3], abs=GRADIENTS / 10), [peak / GRADIENTS for peak in module.peaks]
