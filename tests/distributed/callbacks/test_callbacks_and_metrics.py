"""Callbacks and metrics over two gloo processes: who is slow, what is counted, what is weighed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import LoadBalanceMonitor, LossWeighting
from lightning_videoscale.metrics import ComputeCV, StepTimeSpread
from lightning_videoscale.parallel.mesh import host_group
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class OneGroup(DDPStrategy):
    """Both ranks work on one batch: a stand-in for a sequence-parallel strategy."""

    data_parallel_rank, data_parallel_size, sequence_parallel_size, applies_loss_weight = 0, 1, 2, True

    def host_group(self, timeout: timedelta) -> Any:
        return host_group(timeout)


class UnequallySlow(Slope):
    """Rank 0 computes for 100 ms, rank 1 for 400 ms."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        time.sleep(0.1 if self.global_rank == 0 else 0.4)
        return super().training_step(batch, batch_idx)


def _run_monitor(strategy: type[DDPStrategy]) -> tuple[dict[str, float], list[dict[str, float]], int]:
    rank = torch.distributed.get_rank()
    samples = 1 if rank == 0 or strategy is OneGroup else 3
    metas = [Meta(samples, sequence_length=10)] * 5
    monitor, logger = LoadBalanceMonitor(every_n_steps=2), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, strategy=strategy(), devices=2, use_distributed_sampler=False)
    trainer.fit(UnequallySlow(), batches_of(metas))
    return monitor.summary(), [row for _, row in logger.balance()], trainer.global_step


def test_plain_ddp_ranks_are_compared(ranks: Ranks) -> None:
    for summary, rows, steps in ranks(2).run(_run_monitor, DDPStrategy):
        assert steps == 5 and len(rows) == 3
        # (400 - 100) / 400: the wait of the fast rank, which lies in backward, is not counted.
        assert summary["cv_step"] == pytest.approx(0.75, abs=0.1)
        # Loads 100 and 300: std 100, mean 200.
        assert summary["compute_cv"] == 0.5
        assert summary["samples"] == 5 * (1 + 3)
        assert summary["tokens"] == 5 * (10 + 30)
        assert [row["balance/compute_cv"] for row in rows] == [0.5, 0.5, 0.5]


def test_a_sequence_parallel_group_counts_once(ranks: Ranks) -> None:
    for summary, _, _ in ranks(2).run(_run_monitor, OneGroup):
        assert summary["cv_step"] == 0.0 and summary["compute_cv"] == 0.0
        assert summary["samples"] == 5 and summary["tokens"] == 50


def _run_weighting() -> list[float]:
    # Rank 0 has one sample of value 1, rank 1 three of value 2. The weight is B * ranks / samples of the step.
    rank = torch.distributed.get_rank()
    samples = 1 + 2 * rank
    batch = {"x": torch.full((samples,), 1.0 + rank, dtype=torch.float64), "meta": Meta(samples, 10, samples * 2 / 4)}
    loader: DataLoader[Any] = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    module = Slope()
    trainer_with(LossWeighting(), strategy="ddp", devices=2, use_distributed_sampler=False).fit(module, loader)
    return module.gradients


def test_weights_make_ddp_average_over_samples(ranks: Ranks) -> None:
    assert ranks(2).run(_run_weighting) == [[(1 + 2 + 2 + 2) / 4]] * 2


def _sync_metrics() -> tuple[float, float]:
    # Each rank saw another step; synced, the metrics average over both.
    rank = torch.distributed.get_rank()
    spread, cv = StepTimeSpread(), ComputeCV()
    spread.update(torch.tensor([2.0, 1.0]) if rank == 0 else torch.tensor([4.0, 3.0]))  # 0.5, 0.25
    cv.update(torch.tensor([1, 3 if rank == 0 else 1]), torch.tensor([10, 10]))  # 0.5, 0.0
    return spread.compute().item(), cv.compute().item()


def test_metrics_sync(ranks: Ranks) -> None:
    assert ranks(2).run(_sync_metrics) == [(0.375, 0.25), (0.375, 0.25)]
