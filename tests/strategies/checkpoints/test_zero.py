"""What checkpoints of ZeRO hold beside the tensors that all strategies have, and keep of each rank's share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy, read_weights
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.strategies.checkpoints.checkpointing import NOTHING_TO_SPLIT

Ranks = Callable[[int], ProcessPool]


class Layers(pl.LightningModule):
    """Four layers and a buffer; at the first scales their gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        self.net.register_buffer("calls", torch.ones(()))

    def training_step(self, batch: Tensor) -> Tensor:
        return 50 * self.net(batch.to(self.net[0].weight.dtype)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(stage: int, steps: int, module: pl.LightningModule, start: Path | None = None, **kwargs: Any) -> pl.Trainer:
    with deepspeed_on_cpu():
        strategy = SequenceParallelDeepSpeedStrategy(stage, 1, modules=["net"], plan=NOTHING_TO_SPLIT)
        settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        runner = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=torch.distributed.get_world_size(), **settings, **kwargs
        )
        runner.fit_loop.epoch_loop.max_steps = steps
        runner.fit(module, DataLoader(torch.ones(16, 2), batch_size=2), ckpt_path=start)
    return runner


# -- shares --------------------------------------------------------------------------------------------------------


class Renaming(Layers):
    """Saves its weights by other names, and in half of their size."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"my.{name}": x.half() for name, x in checkpoint["state_dict"].items()}


def save_renamed(path: Path) -> None:
    fit(2, 1, Renaming()).save_checkpoint(path)


@needs_deepspeed
def test_a_hook_that_renames_keeps_every_ranks_share(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_renamed, tmp_path / "renamed.ckpt")
    weights = read_weights(tmp_path / "renamed.ckpt")
    assert set(weights) == {f"my.{name}" for name in Layers().state_dict()}
    assert {x.dtype for x in weights.values()} == {torch.float16}
