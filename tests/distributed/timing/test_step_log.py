"""The step log over two gloo processes: one gather for all callbacks, and the same windows on both ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_videoscale.callbacks import BottleneckAnalyzer, LoadBalanceMonitor, RunReport
from lightning_videoscale.timing import StepWindow, subscribe_to_steps
from tests.callbacks.test_memory_monitor import Scripted
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with
from tests.distributed.pool import ProcessPool
from tests.timing.slow_training import Pace, train


class CountingGathers(DDPStrategy):
    gathers = 0

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self.gathers += 1
        return super().all_gather(*args, **kwargs)


def _count(folder: str) -> int:
    callbacks: list[pl.Callback] = [
        LoadBalanceMonitor(every_n_steps=2),
        RunReport(folder, every_n_steps=2),
        BottleneckAnalyzer(every_n_steps=4),
        Scripted([300.0] * 9, every_n_steps=3),
    ]
    strategy = CountingGathers()
    trainer = trainer_with(*callbacks, strategy=strategy, devices=2, use_distributed_sampler=False)
    trainer.fit(Slope(), batches_of([Meta(1, 10)] * 8))
    return strategy.gathers


def test_ranks_gather_once_for_all_callbacks(ranks: Callable[[int], ProcessPool], tmp_path: Any) -> None:
    """Thirteen windows end with steps 2, 3, 4, 6 and 8, and with the training, which leaves two steps of three."""
    assert ranks(2).run(_count, str(tmp_path)) == [6, 6]


class Agreeing(pl.Callback):
    """Asks the others when it receives a window, which is allowed."""

    def __init__(self) -> None:
        self.windows: list[StepWindow] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            trainer.strategy.barrier()
            self.windows.append(window)

        subscribe_to_steps(trainer, 2, receive, add=lambda: [float(trainer.global_rank)])


def _windows() -> list[StepWindow]:
    agreeing = Agreeing()
    trainer = trainer_with(agreeing, strategy="ddp", devices=2, use_distributed_sampler=False)
    trainer.fit(Slope(), batches_of([Meta(1, 10 + torch.distributed.get_rank())] * 3))
    return agreeing.windows


def test_every_rank_receives_the_same(ranks: Callable[[int], ProcessPool]) -> None:
    first, second = ranks(2).run(_windows)
    for mine, other in zip(first, second, strict=True):
        assert mine.table.equal(other.table) and mine.dp_ranks == other.dp_ranks == [0, 1]
        assert mine.values.tolist() == other.values.tolist() == [[0.0], [1.0]]
    assert first[0].column("sequence_length").tolist() == [[10, 10], [11, 11]]
    assert [window.steps for window in first] == [2, 1]


def _waits_in_slots(strategy: str) -> list[bool]:
    agreeing = Agreeing()
    train(strategy, [Pace(), Pace()], micro_batches=2, callbacks=(agreeing,))
    return [window.in_slots for window in agreeing.windows]


def test_windows_say_whether_ranks_wait_in_every_micro_batch(ranks: Callable[[int], ProcessPool]) -> None:
    assert ranks(2).run(_waits_in_slots, "ddp") == [[False]] * 2
    assert ranks(2).run(_waits_in_slots, "fsdp2") == [[True]] * 2
