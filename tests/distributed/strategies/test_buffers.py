"""Buffers that training writes, such as BatchNorm's statistics: rank 0's, in checkpoints, validation and after fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
    read_weights,
)
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed

Ranks = Callable[[int], ProcessPool]
NOTHING_TO_SPLIT = SplitPlan({}, {}, {}, lambda model, context: lambda: None)


class Normalized(pl.LightningModule):
    """Normalizes by batch, outside of the network that is split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.net = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(self.norm(batch)).square().mean()
        self.trained.append(self.norm.running_mean.clone())
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.validated.append(self.norm.running_mean.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tabled(Normalized):
    """Makes a table for what it sees, which is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.table: Tensor

    def training_step(self, batch: Tensor) -> Tensor:
        self.table = torch.arange(2.0 + self.trainer.strategy.data_parallel_rank)
        return super().training_step(batch)


def fit_tabled(strategy: Any) -> tuple[list[float], int]:
    module = Tabled()
    trainer = pl.Trainer(
        strategy=strategy(ulysses_size=2, modules=["net"], plan=NOTHING_TO_SPLIT),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data[:4], batch_size=1))
    return module.table.tolist(), trainer.strategy.data_parallel_rank


def fit(strategy: Any, folder: Path, sp: int, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean that a rank trained with, validated with, saved and is left with."""
    module = Normalized()
    trainer = pl.Trainer(
        strategy=strategy(ulysses_size=sp, modules=["net"], plan=NOTHING_TO_SPLIT, **kwargs),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=3,
        val_check_interval=3,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data[:4], batch_size=1))
    trainer.save_checkpoint(folder)
    return module.trained[-1], module.validated[-1], read_weights(folder)["norm.running_mean"], module.norm.running_mean


def fit_zero(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with deepspeed_on_cpu():
        return fit(SequenceParallelDeepSpeedStrategy, folder, 2)


def check(results: list[tuple[Tensor, Tensor, Tensor, Tensor]], sp: int) -> None:
    means = [trained for trained, *_ in results]
    assert len({str(mean.tolist()) for mean in means}) == len(results) // sp, "each batch has another mean"
    for _, validated, saved, left in results:
        assert torch.equal(validated, means[0]) and torch.equal(saved, means[0]) and torch.equal(left, means[0])


@pytest.mark.parametrize("strategy", [SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy])
@pytest.mark.parametrize("sp", [1, 2])
def test_rank_0s_statistics_count(ranks: Ranks, tmp_path: Path, strategy: Any, sp: int) -> None:
    check(ranks(4).run(fit, strategy, tmp_path / "last.ckpt", sp), sp)


@needs_deepspeed
def test_rank_0s_statistics_count_with_zero(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks(4).run(fit_zero, tmp_path / "last.ckpt"), 2)


def test_who_wants_buffers_of_each_rank_has_them(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    results = ranks(4).run(fit, SequenceParallelDDPStrategy, path, 2, broadcast_buffers=False)
    for trained, validated, saved, left in results:
        assert torch.equal(validated, trained) and torch.equal(left, trained) and torch.equal(saved, results[0][0])


@pytest.mark.parametrize("strategy", [SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy])
def test_tables_that_are_in_no_checkpoint_are_each_ranks_own(ranks: Ranks, strategy: Any) -> None:
    for table, rank in ranks(4).run(fit_tabled, strategy):
        assert table == [float(n) for n in range(2 + rank)]
