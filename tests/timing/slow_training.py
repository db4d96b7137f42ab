"""A training whose ranks take as long as they are told, under every strategy, on CPUs and on GPUs."""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from lightning_videoscale.timing import StepTimes, StepWindow, subscribe_to_steps
from tests.distributed.zero import deepspeed_on_cpu

NOTHING_TO_SPLIT = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
STRATEGIES = ("plain_ddp", "ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Pace:
    """Seconds that a micro-batch takes on a rank, beside next to nothing."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    validation: float = 0.0


def pause(seconds: float, device: torch.device) -> None:
    """Keeps the device busy: a GPU spins, and the host goes on."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _cycles_per_second(device)))
    else:
        time.sleep(seconds)


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    cycles = 100_000_000
    rates = []
    with torch.cuda.device(device):
        for _ in range(6):  # the clock rises with work
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            rates.append(cycles / begin.elapsed_time(end) * 1e3)
    return max(rates)


class _PauseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pause(ctx.seconds, gradients[0].device)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, width: int, pace: Pace) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        pause(self.pace.forward, x.device)  # first, as recomputation stops once it has what backward needs
        out: Tensor = _PauseInBackward.apply(self.linear(x), self.pace.backward)  # type: ignore[no-untyped-call]
        return out


class Net(nn.Module):
    def __init__(self, blocks: int, width: int, pace: Pace) -> None:
        super().__init__()
        share = replace(pace, forward=pace.forward / blocks, backward=pace.backward / blocks)
        self.blocks = nn.ModuleList(Block(width, share) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SlowSGD(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        pause(self.seconds, self.param_groups[0]["params"][0].device)
        return loss


class Paced(pl.LightningModule):
    """Takes its pace."""

    def __init__(self, pace: Pace, width: int = 8) -> None:
        super().__init__()
        self.pace = pace
        self.net = Net(3, width, pace)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)
        pause(self.pace.validation, self.device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = SlowSGD(self.parameters(), lr=1e-3)
        optimizer.seconds = self.pace.optimizer
        return optimizer


class Rows(Dataset[Tensor]):
    """Rows that take the pace's time to load."""

    def __init__(self, pace: Pace, length: int, width: int = 8) -> None:
        self.pace, self.length, self.width = pace, length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.pace.data)
        return torch.full((self.width,), 1.0 + index % 3)


def strategy_called(name: str, **kwargs: Any) -> Strategy:
    """One of `STRATEGIES`, with a data-parallel rank on every device."""
    if name == "plain_ddp":
        return DDPStrategy()
    kwargs = dict[str, Any](ulysses_size=1, modules=["net"], plan=NOTHING_TO_SPLIT) | kwargs
    if name == "ddp":
        return SequenceParallelDDPStrategy(**kwargs)
    if name == "fsdp2":
        return SequenceParallelFSDP2Strategy(**kwargs)
    return SequenceParallelDeepSpeedStrategy(stage=int(name[-1]), **kwargs)


class ReadingTheClock(pl.Callback):
    """Keeps what the clock says of this rank."""

    times: list[StepTimes]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            rows = window.table[trainer.global_rank].tolist()
            self.times = [StepTimes(*row[: len(StepTimes._fields)]) for row in rows]

        subscribe_to_steps(trainer, 1000, receive)


def train(
    strategy: str,
    paces: list[Pace],
    micro_batches: int = 4,
    width: int = 8,
    callbacks: tuple[pl.Callback, ...] = (),
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[StepTimes]:
    """Trains for some micro-batches on every rank, each at its own pace; returns this rank's times.

    Args:
        strategy: One of `STRATEGIES`.
        paces: Of the ranks.
        micro_batches: Of each rank.
        width: Of the layers.
        callbacks: Beside the one that reads the clock.
        settings: Of the strategy.
        **kwargs: Of the Trainer.
    """
    pace, reading = paces[dist.get_rank()], ReadingTheClock()
    on_gpus = dist.get_backend() == "nccl"
    if on_gpus:
        _cycles_per_second.cache_clear()
        pause(0.0, torch.device("cuda", dist.get_rank()))  # measures the clock, which is not for a step to do
    with ExitStack() as contexts:
        if strategy.startswith("zero") and not on_gpus:
            contexts.enter_context(deepspeed_on_cpu())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            strategy=strategy_called(strategy, **(settings or {})),
            accelerator="gpu" if on_gpus else "cpu",
            devices=dist.get_world_size(),
            max_epochs=1,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            callbacks=[*callbacks, reading],
            **(quiet | kwargs),
        )
        rows = Rows(pace, micro_batches * len(paces), width)
        trainer.fit(Paced(pace, width), DataLoader(rows), DataLoader(Rows(Pace(), len(paces), width)))
    return reading.times
