"""Other budgets in the middle of an epoch: every sample once all the same, whatever workers have read ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_videoscale.cost import BucketBudget, Calibration
from lightning_videoscale.data import VideoDataModule
from tests.data.clips import write_shards
from tests.data.loading.test_resuming import SaveAfter, everything, fit, ids

SAMPLES = 90
SMALL, LARGE = BucketBudget(m_mem=80, m_comp=80 * 80), BucketBudget(m_mem=400, m_comp=400 * 80)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES, shards=3)


class Adopting(Callback):
    """Gives the data other budgets after some optimizer steps of the run; step 0 is the start."""

    def __init__(self, budgets: dict[int, BucketBudget]) -> None:
        self.budgets = dict(budgets)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.adopt(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.adopt(trainer)

    def adopt(self, trainer: Any) -> None:
        if budget := self.budgets.pop(trainer.global_step, None):
            trainer.datamodule.adopt(Calibration(budget))


def data(shards: str, **settings: Any) -> VideoDataModule:
    return VideoDataModule(shards, budget=SMALL, micro_batches=2, **settings)


def tokens(meta: Any) -> int:
    return int(meta.samples * meta.sequence_length)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_rest_of_the_epoch_is_planned_anew(shards: str, num_workers: int) -> None:
    plain = fit(data(shards), 2, max_epochs=2)
    module = fit(data(shards, num_workers=num_workers), 2, None, Adopting({2: LARGE}), max_epochs=2)
    assert all(ids(batches) == everything(SAMPLES) for batches in module.batches.values())
    sizes = [[len(batch) for batch in batches] for batches in module.batches.values()]
    read_ahead = 2 * 2 * num_workers  # two batches per worker, in steps of two
    assert [tokens(meta) for meta in module.metas[:4]] == [tokens(meta) for meta in plain.metas[:4]]
    assert max(map(tokens, module.metas[:4])) <= 80 < max(map(tokens, module.metas[4 + read_ahead :]))
    assert len(sizes[1]) < len(sizes[0]) < len(plain.batches[0])
    assert all(len(batches) % 2 == 0 for batches in sizes)
    assert module.trainer.global_step == sum(map(len, sizes)) / 2


def test_budgets_that_change_at_once_and_twice(shards: str) -> None:
    module = fit(data(shards), 2, None, Adopting({0: LARGE, 3: SMALL, 4: LARGE, 5: SMALL}), max_epochs=1)
    assert ids(module.batches[0]) == everything(SAMPLES)
    assert max(map(tokens, module.metas[:6])) > 80
    assert max(map(tokens, module.metas[-6:])) <= 80


def test_the_trainer_validates_at_the_end_of_the_epoch(shards: str, tmp_path: Path) -> None:
    val = write_shards(tmp_path / "val", 4)
    for budgets in ({2: LARGE}, {0: LARGE, 2: SMALL}):
        module = fit(data(shards, val_shards=val), 2, None, Adopting(budgets), max_epochs=1, num_sanity_val_steps=0)
        assert len(module.validated) == 1 and ids(module.batches[0]) == everything(SAMPLES)
        limited = fit(data(shards), 2, None, Adopting(budgets), max_epochs=1, limit_train_batches=6)
        assert len(limited.batches[0]) == 6


def test_budgets_change_in_a_run_that_validates_every_few_hours(shards: str, tmp_path: Path) -> None:
    val = write_shards(tmp_path / "val", 4)
    settings = {"max_epochs": 1, "val_check_interval": "00:04:00:00", "num_sanity_val_steps": 0}
    module = fit(data(shards, val_shards=val), 2, None, Adopting({2: LARGE}), **settings)
    assert ids(module.batches[0]) == everything(SAMPLES)


@pytest.mark.parametrize("stop", [3, 4, 5, 6, 9])
def test_a_run_goes_on_with_what_was_adopted(shards: str, tmp_path: Path, stop: int) -> None:
    file = tmp_path / "run.ckpt"
    first = fit(data(shards), 2, None, Adopting({2: LARGE}), SaveAfter(stop, file), max_epochs=1)
    resumed = fit(data(shards), 2, file, max_epochs=1)
    done = first.batches[0][: stop // 2 * 2]
    assert ids([*done, *resumed.batches[0]]) == everything(SAMPLES)
    if stop >= 4:
        assert max(map(tokens, resumed.metas)) > 80
        assert resumed.trainer.datamodule.planner.budget == LARGE


def test_another_trainer_begins_with_the_budget_that_was_given(shards: str, tmp_path: Path) -> None:
    both = data(shards)
    fit(both, 2, None, Adopting({2: LARGE}), SaveAfter(6, tmp_path / "run.ckpt"), max_epochs=1)
    assert fit(both, 2, max_epochs=1).batches == fit(data(shards), 2, max_epochs=1).batches
    fit(both, 2, tmp_path / "run.ckpt", max_epochs=1)
    fit(both, 2, max_epochs=1)
    assert both.planner is not None and both.planner.budget == SMALL
    by_hand = data(shards)
    by_hand.adopt(Calibration(LARGE))  # before any run: for all of them
    fit(by_hand, 2, None, Adopting({2: SMALL}), max_epochs=1)
    fit(by_hand, 2, max_epochs=1)
    assert by_hand.planner is not None and by_hand.planner.budget == LARGE


def test_a_share_of_an_epoch_ends_with_a_short_step_whatever_is_adopted_then(shards: str, tmp_path: Path) -> None:
    file, tiny = tmp_path / "run.ckpt", BucketBudget(m_mem=20, m_comp=20 * 80)
    whole = fit(data(shards), 2, max_epochs=1)
    share = 5.5 / len(whole.batches[0])
    first = fit(data(shards), 2, None, Adopting({3: tiny}), SaveAfter(5, file), limit_train_batches=share, max_epochs=1)
    assert len(first.batches[0]) == 5
    resumed = fit(data(shards), 2, file, limit_train_batches=share, max_epochs=2)
    assert [*resumed.batches] == [1]
