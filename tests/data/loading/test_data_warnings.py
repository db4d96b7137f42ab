"""What the user is told about the samples of a plan."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.loading.data_warnings import say_uneven
from lightning_videoscale.data.planning import BucketPlanner
from tests.data.planning.tables import table_of


def test_shapes_whose_samples_count_more_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # One rank: a step of 20 samples of 4 tokens, or one of 80, each with a gradient of its own.
    planner = BucketPlanner(table_of([0] * 40 + [3] * 2), BucketBudget(80, 1e9), "dual_constraint")
    shapes = planner.table.shapes
    say_uneven(planner.plan(0))
    (said,) = [record.message for record in caplog.records]
    assert f"{shapes[3][:3]} counts 10 times" in said and f"{shapes[0][:3]} 0.53 times" in said  # 42 / 4, and a 20th
    assert "loss_normalization='epoch'" in said


def test_nothing_is_said_where_samples_count_alike(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    planner = BucketPlanner(table_of([0] * 40 + [3] * 2), BucketBudget(80, 1e9), loss_normalization="epoch")
    say_uneven(planner.plan(0))
    say_uneven(planner.plan(0, done=np.ones(42, bool)))  # nothing is left of the epoch
    assert not caplog.records
