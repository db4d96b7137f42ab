"""Which budget counts: given, found or adopted, now and in a run that goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_videoscale.cost import BucketBudget, Calibration, MatrixRow, ShapeMatrix, StepTimeModel
from lightning_videoscale.data import AutoBudget, BucketPlanner, RandomBatches
from lightning_videoscale.data.loading import run_budget
from lightning_videoscale.data.loading.run_budget import RunBudget
from tests.data.planning.tables import LENGTHS, WAN_14B, table_of

GIVEN, ADOPTED = BucketBudget(80, 6400.0), BucketBudget(240, 19200.0)
TABLE = table_of([0, 3, 4])
LONGEST = max(LENGTHS)


def find(budget: RunBudget) -> BucketBudget | None:
    """Looks where nothing was measured: M_mem is the longest sample, by costs of Wan-14B."""
    return budget.find(
        None, lambda: BucketPlanner(TABLE, GIVEN), lambda: (TABLE, RandomBatches()), Path("nowhere.json")
    )


def test_a_budget_that_is_given_counts_and_nothing_is_searched() -> None:
    budget = RunBudget(GIVEN, None)
    assert find(budget) is None and budget.training == GIVEN
    assert budget.of(TABLE, None, is_training=False) == (GIVEN, None)
    assert budget.state_dict() == {}


@pytest.mark.parametrize(
    "senseless", [{"reserve": 5}, {"reserve": -0.1}, {"target_sync": 0.0}, {"target_sync": math.inf}]
)
def test_a_senseless_search_is_refused_before_anything_is_measured(senseless: dict[str, float]) -> None:
    [(name, value)] = senseless.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        AutoBudget(**senseless)


def test_a_target_without_seconds_says_what_is_wrong_with_those_measured(tmp_path: Path) -> None:
    ShapeMatrix((MatrixRow(1, 8, 8, 1, 100, seconds=1.0),)).save(tmp_path / "matrix.json")
    budget = RunBudget(AutoBudget(tmp_path / "matrix.json", target_sync=2.0), None)
    with pytest.raises(ValueError, match=r"target_sync=2\.0 s .*got 1 of 1"):
        find(budget)


def test_a_budget_is_found_once_and_only_for_training() -> None:
    budget = RunBudget("auto", WAN_14B)
    found = find(budget)
    p = WAN_14B.power_law.p
    assert found is not None and (found.m_mem, found.p) == (LONGEST, p)
    assert find(budget) is None
    assert budget.of(TABLE, None, is_training=True) == (found, WAN_14B)
    assert budget.of(TABLE, None, is_training=False) == (BucketBudget(LONGEST, LONGEST**p, p), WAN_14B)


def test_what_was_adopted_goes_before_what_was_found_when_a_run_goes_on() -> None:
    before = RunBudget("auto", WAN_14B)
    found = find(before)
    found_only = before.state_dict()
    before.adopt(Calibration(ADOPTED))
    again = RunBudget("auto", None)
    again.load_state_dict(before.state_dict())
    assert again.training == ADOPTED and again.state_dict() == before.state_dict()
    resumed = RunBudget("auto", None)
    resumed.load_state_dict(found_only)
    assert resumed.training == found and isinstance(resumed.step_time, StepTimeModel)

    explicit = RunBudget(GIVEN, None)
    explicit.load_state_dict(found_only)
    assert explicit.training == GIVEN, "an argument goes before what another run found"
    named = RunBudget(AutoBudget("matrix.json"), None)
    named.load_state_dict(found_only)
    assert named.training is None, "a matrix that is named is read again"


class Measuring(pl.LightningModule):
    """One whose budget is found in each test anew; nothing of it is trained."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)


def trainer_of(module: pl.LightningModule) -> pl.Trainer:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer


@pytest.mark.parametrize(("width", "is_found_anew"), [(4, False), (8, True)])
def test_what_was_found_for_another_model_or_machine_is_found_anew(width: int, is_found_anew: bool) -> None:
    def find_in(budget: RunBudget, trainer: pl.Trainer) -> Any:
        return budget.find(
            trainer, lambda: BucketPlanner(TABLE, GIVEN), lambda: (TABLE, RandomBatches()), Path("nowhere.json")
        )

    first, second = (RunBudget(AutoBudget(), None) for _ in range(2))
    with mock.patch.object(run_budget, "known_matrix", lambda *_: (None, "nothing was measured")):
        find_in(first, trainer_of(Measuring()))
        second.load_state_dict(first.state_dict())
        found = find_in(second, trainer_of(Measuring(width)))
    assert (found is not None) == is_found_anew


def test_a_budget_that_is_given_anew_and_does_not_count_is_told(caplog: pytest.LogCaptureFixture) -> None:
    before, other = RunBudget(GIVEN, None), BucketBudget(160, 12800.0)
    before.adopt(Calibration(ADOPTED))
    with caplog.at_level("INFO"):
        RunBudget(GIVEN, None).load_state_dict(before.state_dict())
        assert not caplog.messages, "nothing was changed"
        again = RunBudget(other, None)
        again.load_state_dict(before.state_dict())
    assert again.training == ADOPTED
    [said] = caplog.messages
    assert f"now, {other}, does not count" in said and f"checkpoint's does, {ADOPTED}," in said
