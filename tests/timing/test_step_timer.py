"""The clock on a Trainer of one process; tests/distributed has it on two, under every strategy."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.timing import StepTimer, StepTimes
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with


class Reading(pl.Callback):
    """Reads every so many micro-batches."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.reads: list[list[StepTimes]] = []

    @property
    def times(self) -> list[StepTimes]:
        return [times for read in self.reads for times in read]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.timer = StepTimer(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every == 0:
            self.reads.append(self.timer.read())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.timer.close()
        self.timer.close()  # twice is once


class Slow(Slope):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        time.sleep(0.03)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        time.sleep(0.06)


def test_it_leaves_nothing_behind() -> None:
    reading = Reading(every=2)
    trainer: Any = trainer_with(reading)
    before = trainer.callbacks
    for _ in range(2):  # the second fit puts a clock on the Trainer anew
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Slow(), batches_of([Meta(1, 10)] * 4))
        assert [len(read) for read in reading.reads] == [2] * 2
        assert all(times.forward >= 0.03 for times in reading.times)
        assert trainer.callbacks == before
        assert "start" not in vars(trainer.profiler)
        reading.reads = []


@pytest.mark.timed
def test_validation_and_a_slow_loader_are_told_apart() -> None:
    class SlowLoader(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.1)
            return super().__getitem__(index)

    reading = Reading()
    rows: Any = SlowLoader([{"x": torch.ones(1)}] * 4)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)
    trainer_with(reading, val_check_interval=2).fit(Slow(), loader, batches_of([Meta(1, 10)]))
    times = reading.times
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
    assert len(reading.timer.read()) == 2, "what ended can still be read"


def test_it_needs_the_wrapped_model() -> None:
    with pytest.raises(RuntimeError, match="on_fit_start"):
        StepTimer(trainer_with())


def test_a_profiler_of_ones_own_gets_back_what_it_had() -> None:
    seen: list[str] = []
    trainer: Any = trainer_with(Reading())
    trainer.profiler.start = seen.append
    trainer.fit(Slow(), batches_of([Meta(1, 10)] * 2))
    assert trainer.profiler.start == seen.append
    assert seen.count("[_TrainingEpochLoop].train_dataloader_next") == 2
