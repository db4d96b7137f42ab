"""DDP keeps gradients once, as views of its buckets, unless asked otherwise; clipping and accumulation see the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.strategies.failures.failing_training import STEPS, Module, split_plan


class Watched(Module):
    """Counts the storages that hold its gradients."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.gradients, self.storages = len(gradients), len({g.untyped_storage().data_ptr() for g in gradients})


def train(**kwargs: Any) -> tuple[int, int, list[float]]:
    torch.manual_seed(0)
    module = Watched()
    pl.Trainer(
        strategy=SequenceParallelDDPStrategy(modules=["net"], plan=split_plan(), **kwargs),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=STEPS // 2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(torch.randn(STEPS, 9, 8, generator=torch.Generator().manual_seed(1))))
    return module.gradients, module.storages, module.losses


def test_gradients_are_kept_once_unless_asked_otherwise(ranks: Callable[[int], ProcessPool]) -> None:
    for views, copies in zip(ranks(2).run(train), ranks(2).run(train, gradient_as_bucket_view=False), strict=True):
        assert views[0] == copies[0] == copies[1] == 8
        assert views[1] <= 2  # buckets, of which the first is small
        assert views[2] == pytest.approx(copies[2], rel=1e-6)


class Held(Module):
    """A thread holds the gradients of the first step for a while, as NCCL's own holds what it has exchanged."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 1:
            gradients = [p.grad.detach() for p in self.parameters() if p.grad is not None]
            self.first = [StorageWeakRef(gradient.untyped_storage()) for gradient in gradients]
            Thread(target=_hold, args=(gradients,)).start()

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.trainer.global_step == 1:
            self.gone = all(storage.expired() for storage in self.first)


def _hold(gradients: list[torch.Tensor]) -> None:
    time.sleep(0.3)
    gradients.clear()


def train_while_held() -> bool:
    torch.manual_seed(0)
    module = Held()
    strategy = SequenceParallelDDPStrategy(modules=["net"], plan=split_plan())
    pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(torch.randn(STEPS, 9, 8, generator=torch.Generator().manual_seed(1))))  # fmt: skip
    return module.gone


def test_the_first_buckets_are_gone_before_the_second_backward(ranks: Callable[[int], ProcessPool]) -> None:
    """DDP makes others in the second step, and both beside all activations may be too much."""
    assert ranks(2).run(train_while_held) == [True, True]
