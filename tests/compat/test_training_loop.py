"""What we use of Lightning's training loop does what we say, in a real Trainer of the installed version."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_videoscale.compat import lightning as private
from lightning_videoscale.compat.lightning import training_loop
from tests.compat.trainers import Model, Recorder, trainer


def test_whether_a_micro_batch_accumulates() -> None:
    seen: list[bool] = []

    class BeforeBackward(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
            seen.append(training_loop.accumulates(trainer))

    trainer(BeforeBackward(), accumulate_grad_batches=2, limit_train_batches=3).fit(BoringModel())
    assert seen == [True, False, False]  # the last step of an epoch may be a shorter one


class Steps(pl.Callback):
    """Keeps the number of every step, and that of the last one when training is over."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(training_loop.logged_step(trainer))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append(training_loop.logged_step(trainer))


class TwoOptimizers(BoringModel):
    """Steps both in every batch; ends its epoch before batch ``last``."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.last = last

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.last else None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()


def test_steps_are_numbered_as_self_log_does() -> None:
    steps = Steps()
    runner = trainer(steps, accumulate_grad_batches=2, limit_train_batches=3, max_epochs=2)
    runner.fit(BoringModel())
    assert steps.seen == [0, 0, 1, 2, 2, 3, 3] and runner.global_step == 4


@pytest.mark.parametrize("last", [None, 3])
def test_two_optimizers_are_one_step_where_a_batch_ends(last: int | None) -> None:
    steps = Steps()
    runner = trainer(steps, limit_train_batches=3 if last is None else 5)
    runner.fit(TwoOptimizers(last))
    assert steps.seen == [0, 1, 2, 2] and runner.global_step == 6


def test_the_loop_tells_the_profiler_that_it_fetches() -> None:
    profiler = SimpleProfiler()
    trainer(profiler=profiler, limit_train_batches=2).fit(BoringModel())
    assert len(profiler.recorded_durations[private.FETCH_ACTION]) in (2, 3)


def test_where_ranks_wait_between_batches() -> None:
    runner = trainer(limit_train_batches=2)
    [method] = training_loop.waits_between_batches(runner)
    assert callable(getattr(*method))
    training_loop.skip_waits_between_batches(runner)
    runner.fit(BoringModel())
    assert runner.global_step == 2


def test_a_function_is_called_before_each_batch_is_fetched() -> None:
    seen: list[tuple[int, bool]] = []
    runner = trainer(limit_train_batches=2)
    progress = runner.fit_loop.epoch_loop.batch_progress
    training_loop.before_each_batch(
        runner, lambda: seen.append((progress.current.ready, training_loop.accumulates(runner)))
    )
    runner.fit(BoringModel())
    assert seen == [(0, False), (1, False)]


class Batches(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(self.count, 32))


def skip_from_the_third(_: pl.Trainer, index: int) -> int | None:
    return -1 if index == 2 else None


def stop_in_the_second(trainer: pl.Trainer, index: int) -> None:
    trainer.should_stop |= index == 1


@pytest.mark.parametrize(
    ("data", "hook", "seen"),
    [
        (torch.randn(2, 32), None, [(0, 2, 2), "validation", (1, 2, 4), "validation"]),
        (Batches(2), None, [(0, 2, 2), "validation", (1, 2, 4), "validation"]),
        (Batches(0), None, [(0, 0, 0), (1, 0, 0)]),
        (torch.randn(5, 32), skip_from_the_third, [(0, 3, 3), (1, 3, 6)]),
        (torch.randn(5, 32), stop_in_the_second, [(0, 2, 2), "validation"]),
    ],
    ids=["sized", "iterable", "empty", "skipped", "stopped"],
)
def test_a_function_is_called_at_the_end_of_an_epoch_before_its_validation(
    data: Any, hook: Callable[[pl.Trainer, int], int | None] | None, seen: list[Any]
) -> None:
    found: list[Any] = []
    model = BoringModel()
    model.on_validation_start = lambda: found.append("validation")  # type: ignore[method-assign]
    runner = trainer(max_epochs=2, limit_val_batches=1)
    if hook is not None:
        model.on_train_batch_start = lambda _, index: hook(runner, index)  # type: ignore[method-assign]
    training_loop.at_end_of_epoch(runner, lambda: found.append(tuple(training_loop.batches_begun(runner))))
    runner.fit(model, DataLoader(data), DataLoader(torch.randn(1, 32)))
    assert found == ["validation", *seen]  # the sanity check's


def test_or_after_a_validation_in_the_middle_that_stops_training() -> None:
    found: list[Any] = []
    model, runner = BoringModel(), trainer(limit_val_batches=1, val_check_interval=2, num_sanity_val_steps=0)

    def stop() -> None:
        found.append("validation")
        runner.should_stop = True

    model.on_validation_end = stop  # type: ignore[method-assign]
    training_loop.at_end_of_epoch(runner, lambda: found.append(tuple(training_loop.batches_begun(runner))))
    runner.fit(model, DataLoader(torch.randn(5, 32)), DataLoader(torch.randn(1, 32)))
    assert found == ["validation", (0, 2, 2)]


@pytest.mark.parametrize(("limit", "left"), [(1.0, 10), (0.5, 5), (3, 3), (100, 10), (None, 10)])
def test_limits_are_those_of_lightning(limit: float | None, left: int) -> None:
    runner = trainer(limit_train_batches=limit)
    assert training_loop.limited_batches(10, runner.limit_train_batches) == left
    runner.fit(BoringModel(), DataLoader(torch.zeros(10, 32)))
    assert runner.num_training_batches == left


def test_an_epoch_gets_another_length() -> None:
    recorder = Recorder(lambda trainer, index: training_loop.set_epoch_length(trainer, None, 3) if index == 1 else None)
    runner = trainer(recorder)
    runner.fit(Model())
    assert len(recorder.returned) == runner.num_training_batches == 3


@pytest.mark.parametrize(("mode", "batches"), [("max_size_cycle", 5), ("max_size", 5), ("min_size", 3)])
def test_an_epoch_of_several_loaders_gets_another_length(mode: Any, batches: int) -> None:
    class Several(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["b"], batch_idx)

    def shorten(trainer: pl.Trainer, index: int) -> None:
        if index == 1:
            training_loop.set_epoch_length(trainer, trainer.train_dataloader["a"].sampler, 3)

    recorder = Recorder(shorten)
    loaders = {name: DataLoader(torch.zeros(length, 32)) for name, length in {"a": 9, "b": 5}.items()}
    trainer(recorder).fit(Several(), CombinedLoader(loaders, mode))
    assert len(recorder.returned) == batches


def test_a_trainer_asks_for_another_loader() -> None:
    runner = trainer(limit_train_batches=1)
    runner.fit(Model())
    assert runner.train_dataloader is not None
    training_loop.forget_training_loader(runner)
    assert runner.train_dataloader is None


class GoingOn(Sampler[int]):
    """What is left of an epoch after two batches, of which it tells the Trainer when the epoch begins."""

    runner: pl.Trainer

    def set_epoch(self, epoch: int) -> None:
        training_loop.place_in_epoch(self.runner, epoch=0, batches=2, total=2)

    def __iter__(self) -> Iterator[int]:
        return iter(range(2, 6))

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("warned_of", [False, True])
def test_a_run_goes_on_within_an_epoch_and_warnings_are_as_before(warned_of: bool) -> None:
    sampler = GoingOn()
    seen = Recorder(lambda trainer, index: (index, trainer.fit_loop.epoch_loop.total_batch_idx))
    sampler.runner = trainer(seen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        sampler.runner.fit(BoringModel(), DataLoader(torch.zeros(6, 32), sampler=sampler))
        assert warnings.filters == before
        if warned_of:
            warnings.warn("You're resuming from a checkpoint that ended before the epoch ended", stacklevel=1)
    assert seen.returned == [(2, 2), (3, 3), (4, 4), (5, 5)]
    assert any("resuming from a checkpoint" in str(warning.message) for warning in caught) is warned_of
    assert "reset" not in vars(sampler.runner.fit_loop.epoch_loop)


def test_the_loaders_of_the_loop_that_runs() -> None:
    seen: dict[str, list[Any]] = {}

    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            seen["train"] = training_loop.loaders_under_way(trainer)

        def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            seen["val"] = training_loop.loaders_under_way(trainer)

    class Several(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["b"], batch_idx)

    a, b, c = (DataLoader(torch.zeros(2, 32)) for _ in range(3))
    runner = trainer(Looking(), limit_train_batches=1, limit_val_batches=1)
    assert training_loop.loaders_under_way(runner) == []
    runner.fit(Several(), {"a": a, "b": b}, c)
    assert seen == {"train": [a, b], "val": [c]}
