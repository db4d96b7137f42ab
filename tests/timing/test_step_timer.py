"""The clock on a Trainer of one process; tests/distributed has it on two, under every strategy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_videoscale.timing import Marks, StepTimer, StepTimes, step_timer
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


def assert_no_clock_is_on(trainer: Any, callbacks: list[pl.Callback]) -> None:
    assert trainer.callbacks == callbacks
    assert not {"start", "stop"} & {*vars(trainer.profiler)}
    assert not {"training_step", "optimizer_step"} & {*vars(trainer.strategy)}
    assert "clip_gradients" not in vars(trainer.precision_plugin)


def test_it_leaves_nothing_behind() -> None:
    reading = Reading(every=2)
    trainer: Any = trainer_with(reading)
    before = trainer.callbacks
    for _ in range(2):  # the second fit puts a clock on the Trainer anew
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Slow(), batches_of([Meta(1, 10)] * 4))
        assert [len(read) for read in reading.reads] == [2] * 2
        assert all(times.forward >= 0.03 for times in reading.times)
        assert_no_clock_is_on(trainer, before)
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
    assert_no_clock_is_on(trainer, before)
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


class ScriptedTime(Marks):
    """A clock that the training moves."""

    now = 0.0

    def set(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedTime:
    script = ScriptedTime()
    monkeypatch.setattr(step_timer, "marks_on", lambda device: script)
    return script


class Early(pl.Callback):
    """Works for 16 s before a step begins."""

    def __init__(self, script: ScriptedTime) -> None:
        self.script = script

    def on_train_batch_start(self, *args: Any) -> None:
        self.script.pass_by(16)


class Scripted(Slope):
    """Takes 1 s for a forward pass, 2 s for a backward pass, 4 s for an optimizer's step and 32 s before the step."""

    def __init__(self, script: ScriptedTime) -> None:
        super().__init__()
        self.script = script

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.script.pass_by(32)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        self.script.pass_by(1)
        loss = (self.slope * batch["x"]).mean()
        loss.register_hook(lambda _: self.script.pass_by(2))
        return loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.script.pass_by(4))
        return optimizer


class Adversaries(Scripted):
    """Two passes and two optimizers in a step, as of a generator and its critic; the critic's is clipped in 8 s."""

    def __init__(self, script: ScriptedTime) -> None:
        super().__init__(script)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        generator, critic = self.optimizers()  # type: ignore[attr-defined]  # there are two
        self.manual_backward(self.loss(batch))
        generator.step()
        generator.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(critic, gradient_clip_val=1.0)
        critic.step()

    def configure_optimizers(self) -> Any:
        return [Scripted.configure_optimizers(self) for _ in range(2)]


class Closures(Adversaries):
    """Gives each optimizer's step its passes as a closure."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step(closure=lambda: self.manual_backward(self.loss(batch)))


def scripted_times(module: Scripted, **settings: Any) -> list[StepTimes]:
    reading = Reading()
    trainer = trainer_with(reading, Early(module.script), **settings)
    trainer.fit(module, batches_of([Meta(1, 10)] * 2))
    return reading.times


def test_what_hooks_do_before_the_step_is_not_the_models(scripted: ScriptedTime) -> None:
    assert scripted_times(Scripted(scripted)) == [StepTimes(forward=1, backward=2, optimizer=4, other=48)] * 2


def test_only_the_last_of_accumulated_micro_batches_steps(scripted: ScriptedTime) -> None:
    first, last = scripted_times(Scripted(scripted), accumulate_grad_batches=2)
    assert first == last._replace(optimizer=0) == StepTimes(forward=1, backward=2, other=48)
    assert last.optimizer == 4


def test_passes_between_two_optimizers_are_the_models(scripted: ScriptedTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: scripted.pass_by(8))
    assert scripted_times(Adversaries(scripted)) == [StepTimes(forward=2, backward=4, optimizer=16, other=48)] * 2


def test_passes_in_closures_of_manual_steps_are_the_models(scripted: ScriptedTime) -> None:
    assert scripted_times(Closures(scripted)) == [StepTimes(forward=2, backward=4, optimizer=8, other=48)] * 2


def test_a_step_that_is_skipped_has_no_longer_forward_pass(scripted: ScriptedTime) -> None:
    class Skipping(Scripted):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            """There are no gradients to note."""

    first, second = scripted_times(Skipping(scripted))
    assert first == second._replace(backward=0) == StepTimes(forward=1, optimizer=4, other=48)


def test_a_step_that_fetches_its_batch_computes_behind_it(scripted: ScriptedTime) -> None:
    class Fetching(Scripted):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            batch, *_ = next(dataloader_iter)
            return self.loss(batch)

    class SlowRows(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            scripted.pass_by(64)
            return super().__getitem__(index)

    reading, rows = Reading(), SlowRows([{"x": torch.ones(1)}] * 2)
    trainer_with(reading, Early(scripted)).fit(Fetching(scripted), DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    assert [times._replace(other=0.0) for times in reading.times] == [StepTimes(64, 1, 2, optimizer=4)] * 2


class ShorterThanItSays(IterableDataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield {"x": torch.ones(1)}


def test_what_comes_behind_an_epoch_that_ends_early_is_no_waiting_for_data(scripted: ScriptedTime) -> None:
    class Saves(Scripted):
        def on_train_epoch_end(self) -> None:
            self.script.pass_by(64)

    reading, loader = Reading(), DataLoader(ShorterThanItSays(), batch_size=None)
    trainer_with(reading, max_epochs=2).fit(Saves(scripted), loader)
    once = StepTimes(forward=1, backward=2, optimizer=4, other=32)
    assert reading.times == [once, once._replace(other=96)]
