"""Whose run the figures of callbacks are of, where the callbacks are restored or serve another fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_videoscale.callbacks import BottleneckAnalyzer, LoadBalanceMonitor
from tests.callbacks.test_memory_monitor import GIB, Scripted
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with

Count = Callable[[Any], float]

CALLBACKS = [
    pytest.param(LoadBalanceMonitor, lambda monitor: monitor.summary()["samples"], id="balance"),
    pytest.param(BottleneckAnalyzer, lambda analyzer: len(analyzer.history), id="bottleneck"),
    pytest.param(
        lambda **settings: Scripted([100 + n for n in range(9)], **settings),
        lambda monitor: len(monitor.peaks),
        id="memory",
    ),
]


class Tested(Slope):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        pass

    test_step = validation_step


def data(steps: int, first: int = 0) -> Any:
    return batches_of([Meta(1, 10 * (first + n + 1)) for n in range(steps)])


@pytest.mark.parametrize(("make", "count"), CALLBACKS)
def test_a_checkpoint_that_is_validated_or_tested_leaves_them(
    make: Callable[..., pl.Callback], count: Count, tmp_path: Path
) -> None:
    callback, module, file = make(every_n_steps=1), Tested(), tmp_path / "begun.ckpt"
    trainer = trainer_with(callback)
    trainer.fit(module, data(2))
    trainer.save_checkpoint(file)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(3, first=2))
    assert count(callback) == 5, "a Trainer that fits again goes on"
    for look in (trainer.validate, trainer.test):
        look(module, data(1), ckpt_path=file, verbose=False)
        assert count(callback) == 5
    trainer_with(callback, max_epochs=2).fit(module, data(1, first=2), ckpt_path=file)
    assert count(callback) == 3, "what is resumed counts"


@pytest.mark.parametrize(("make", "count"), CALLBACKS)
def test_another_fit_begins_anew(make: Callable[..., pl.Callback], count: Count) -> None:
    callback = make(every_n_steps=1)
    for steps in (4, 2):
        trainer_with(callback).fit(Slope(), data(steps))
        assert count(callback) == steps


def test_the_peak_is_of_the_run_too() -> None:
    monitor = Scripted([300, 200], every_n_steps=1)
    for peak in (300, 200):
        trainer_with(monitor).fit(Slope(), data(1))
        assert monitor.peak_bytes == peak * GIB


def test_what_is_loaded_by_hand_before_a_first_fit_counts() -> None:
    first, second = LoadBalanceMonitor(every_n_steps=1), LoadBalanceMonitor(every_n_steps=1)
    trainer_with(first).fit(Slope(), data(2))
    second.load_state_dict(first.state_dict())
    trainer_with(second).fit(Slope(), data(3))
    assert second.summary()["samples"] == 5
