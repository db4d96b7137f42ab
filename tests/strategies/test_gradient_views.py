"""DDP keeps gradients once, as views of its buckets, unless asked otherwise; clipping and accumulation see the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool
from tests.strategies.failures.failing_training import STEPS, Module, split_plan


class Watched(Module):
    """Counts the storages that hold its gradients, and looks how large they may be."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        assert isinstance(self.trainer.strategy.model, DistributedDataParallel)
        self.bucket_mib = self.trainer.strategy.model.bucket_bytes_cap / 2**20
        self.gradients, self.storages = len(gradients), len({g.untyped_storage().data_ptr() for g in gradients})


def train(**kwargs: Any) -> tuple[int, int, list[float], float]:
    torch.manual_seed(0)
    module = Watched()
    strategy = SequenceParallelDDPStrategy(modules=["net"], plan=split_plan(), **kwargs)
    trainer_with(
        strategy=strategy,
        devices=dist.get_world_size(),
        max_steps=STEPS // 2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    ).fit(module, DataLoader(torch.randn(STEPS, 9, 8, generator=torch.Generator().manual_seed(1))))
    return module.gradients, module.storages, module.losses, module.bucket_mib


def test_buckets_hold_100_mib_unless_asked_otherwise(ranks: Callable[[int], ProcessPool]) -> None:
    assert [rank[3] for rank in ranks(2).run(train) + ranks(2).run(train, bucket_cap_mb=7)] == [100, 100, 7, 7]


def test_gradients_are_kept_once_unless_asked_otherwise(ranks: Callable[[int], ProcessPool]) -> None:
    for views, copies in zip(ranks(2).run(train), ranks(2).run(train, gradient_as_bucket_view=False), strict=True):
        assert views[0] == copies[0] == copies[1] == 8
        assert views[1] == 1  # bucket
        assert views[2] == pytest.approx(copies[2], rel=1e-6)
