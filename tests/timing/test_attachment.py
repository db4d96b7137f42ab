"""The clock on a Trainer of one process; tests/distributed has it on two, under every strategy."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.timing import StepTimes, StepWatch, watch_steps
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with


class Reading(pl.Callback):
    """Reads every so many micro-batches."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.reads: list[list[StepTimes]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.watch: StepWatch = watch_steps(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every == 0:
            self.reads.append(self.watch.read())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.watch.close()


class Slow(Slope):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        time.sleep(0.03)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        time.sleep(0.06)


def test_callbacks_share_a_clock_and_leave_nothing_behind() -> None:
    often, rarely = Reading(), Reading(every=2)
    trainer: Any = trainer_with(often, rarely)
    before = trainer.callbacks
    for _ in range(2):  # the second fit puts a clock on the Trainer anew
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Slow(), batches_of([Meta(1, 10)] * 4))
        assert [len(read) for read in often.reads] == [1] * 4
        assert [len(read) for read in rarely.reads] == [2] * 2
        assert [times for read in often.reads for times in read] == [times for read in rarely.reads for times in read]
        assert all(times.forward >= 0.03 for read in often.reads for times in read)
        assert trainer.callbacks == before
        assert "start" not in vars(trainer.profiler)
        often.reads, rarely.reads = [], []


def test_validation_and_a_slow_loader_are_told_apart() -> None:
    class SlowLoader(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.1)
            return super().__getitem__(index)

    reading = Reading()
    rows: Any = SlowLoader([{"x": torch.ones(1)}] * 4)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)
    trainer_with(reading, val_check_interval=2).fit(Slow(), loader, batches_of([Meta(1, 10)]))
    times = [times for read in reading.reads for times in read]
    assert all(time.data >= 0.1 > time.optimizer for time in times)
    assert times[2].other >= 0.06 > min(time.other for time in times)


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    class Failing(Slow):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    reading = Reading(every=9)
    trainer: Any = trainer_with(reading)
    before = trainer.callbacks
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(Failing(), batches_of([Meta(1, 10)] * 4))
    assert trainer.callbacks == before
    assert "start" not in vars(trainer.profiler)
    assert len(reading.watch.read()) == 2, "what ended can still be read"


def test_it_needs_the_wrapped_model() -> None:
    with pytest.raises(RuntimeError, match="call watch_steps in on_fit_start, or later"):
        watch_steps(trainer_with())


def test_a_profiler_of_ones_own_gets_back_what_it_had() -> None:
    seen: list[str] = []
    trainer: Any = trainer_with(Reading())
    trainer.profiler.start = seen.append
    trainer.fit(Slow(), batches_of([Meta(1, 10)] * 2))
    assert trainer.profiler.start == seen.append
    assert seen.count("[_TrainingEpochLoop].train_dataloader_next") == 2
