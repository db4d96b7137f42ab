"""The step log on a Trainer of one process: who receives what, and when; tests/distributed has it on two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_videoscale.callbacks.balance_metrics import BalanceMetrics
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.report.records import window_record
from lightning_videoscale.timing import MicroBatchLoad, StepTimes, StepWindow, subscribe_to_steps
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with
from tests.timing.windows import window_of


class Subscribing(pl.Callback):
    """Keeps its windows, each with the step at which it came."""

    def __init__(self, every_n_steps: int | None, **settings: Any) -> None:
        self.every_n_steps, self.settings = every_n_steps, settings
        self.windows: list[tuple[int, StepWindow]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            self.windows.append((trainer.global_step, window))

        subscribe_to_steps(trainer, self.every_n_steps, receive, **self.settings)

    @property
    def seen(self) -> list[tuple[int, list[float]]]:
        """Step by step, the lengths of the micro-batches of the first rank."""
        return [(step, window.column("sequence_length")[0].tolist()) for step, window in self.windows]


def fit(*callbacks: pl.Callback, lengths: Sequence[int] = range(10, 17), **settings: Any) -> pl.Trainer:
    trainer = trainer_with(*callbacks, **settings)
    trainer.fit(Slope(), batches_of([Meta(2, length) for length in lengths]))
    return trainer


def test_every_subscriber_has_windows_of_its_own_length_and_the_rest_at_the_end() -> None:
    two, three = Subscribing(2), Subscribing(3)
    trainer: Any = fit(two, three)
    assert two.seen == [(2, [10, 11]), (4, [12, 13]), (6, [14, 15]), (7, [16])]
    assert three.seen == [(3, [10, 11, 12]), (6, [13, 14, 15]), (7, [16])]
    assert trainer.callbacks == [two, three], "and the log is gone"
    (_, first), (_, second) = two.windows[0], three.windows[0]
    assert first.table.equal(second.table[:, :2]), "the same steps are the same figures"


def test_accumulated_micro_batches_are_one_step() -> None:
    subscriber = Subscribing(2)
    fit(subscriber, accumulate_grad_batches=2)
    assert subscriber.seen == [(2, [10, 11, 12, 13]), (4, [14, 15, 16])]
    assert [window.micro_batches for _, window in subscriber.windows] == [[2, 2], [2, 1]]


def test_steps_may_be_skipped() -> None:
    often, later = Subscribing(1), Subscribing(2, skip=3)
    fit(often, later)
    assert later.seen == [(5, [13, 14]), (7, [15, 16])]
    assert len(often.seen) == 7
    none_left = Subscribing(2, skip=9)
    fit(none_left)
    assert none_left.seen == []


def test_the_trainers_interval() -> None:
    subscriber = Subscribing(None)
    fit(subscriber, log_every_n_steps=4)
    assert [step for step, _ in subscriber.seen] == [4, 7]


def test_a_row_is_a_micro_batchs_times_and_load() -> None:
    subscriber = Subscribing(2, add=lambda: [0.25, 4.0])
    fit(subscriber, lengths=[10, 20])
    [(_, window)] = subscriber.windows
    assert window.values.tolist() == [[0.25, 4.0]]
    assert window.table.shape == (1, 2, len(StepTimes._fields) + len(MicroBatchLoad._fields))
    assert window.column("samples").tolist() == [[2, 2]] and window.column("loss_weight").tolist() == [[1, 1]]
    assert window.tells_loads and (window.column("forward") > 0).all()
    assert window.column("work").equal(window.column("compute") + window.column("exchange"))


@pytest.mark.parametrize("meta", [None, Meta(2, 0)], ids=["no meta", "no tokens"])
def test_batches_that_do_not_tell_have_no_load(meta: Meta | None) -> None:
    subscriber = Subscribing(1)
    trainer_with(subscriber).fit(Slope(), batches_of([meta]))
    [(_, window)] = subscriber.windows
    assert not window.tells_loads and window.column("samples").tolist() == [[meta.samples if meta else 0]]
    assert window_record(window)["tokens"] is None
    assert "balance/compute_cv" not in BalanceMetrics(2.0, GEOMETRIES["wan2.1"]).update(window, 1.0)


def test_one_may_subscribe_in_the_middle_and_train_again() -> None:
    class Late(Subscribing):
        def on_train_start(self, *_: Any) -> None:
            pass

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                super().on_train_start(trainer, pl_module)

    early, late = Subscribing(5), Late(2)
    trainer: Any = trainer_with(early, late)
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Slope(), batches_of([Meta(1, length) for length in range(10, 17)]))
        assert [lengths for _, lengths in early.seen] == [[10, 11, 12, 13, 14], [15, 16]]
        assert [lengths for _, lengths in late.seen] == [[13, 14], [15, 16]]
        early.windows, late.windows = [], []


def test_what_a_subscriber_raises_ends_the_training_and_the_log() -> None:
    class Failing(Subscribing):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            def receive(window: StepWindow) -> None:
                raise ArithmeticError("no")

            subscribe_to_steps(trainer, 2, receive)

    callback = Failing(2)
    trainer: Any = trainer_with(callback)
    with pytest.raises(ArithmeticError):
        trainer.fit(Slope(), batches_of([Meta(1, 10)] * 4))
    assert trainer.callbacks == [callback] and trainer.global_step == 2


def seconds(*columns: list[float]) -> Tensor:
    return torch.tensor(columns, dtype=torch.float64)


def test_a_group_counts_once_with_its_slowest_rank() -> None:
    times = [[2.0, 1.0], [1.0, 5.0], [2.5, 0.5], [1.5, 4.0]]
    window = window_of([[StepTimes(forward=s) for s in row] for row in times], dp_ranks=[1, 0, 1, 0])
    assert window.of_groups("work").equal(seconds([1.5, 5.0], [2.5, 1.0]))


def test_what_all_ranks_wait_is_the_collective() -> None:
    window = window_of([[StepTimes(wait=3.0), StepTimes(wait=0.5)], [StepTimes(wait=1.0), StepTimes(wait=2.0)]])
    assert window.reduction.tolist() == [1.0, 0.5]


def test_steps_of_unequal_numbers_of_micro_batches() -> None:
    window = window_of([[StepTimes(wait=s) for s in (1.0, 2.0, 4.0)]], micro_batches=[1, 2])
    assert window.by_step(window.column("wait")).tolist() == [[[1.0, 0.0], [2.0, 4.0]]]
    assert window.per_step(window.column("wait")).tolist() == [[1.0, 6.0]]
