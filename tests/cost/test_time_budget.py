"""Batches that take a target: as many samples as the better form of the cost model allows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.cost import BucketBudget, Calibration, StepTimeModel, TimeBudget
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.calibration import read_budget
from lightning_videoscale.cost.step_time import AdditiveCost, PowerLaw

BY_SUM = StepTimeModel(PowerLaw(0.02, 1e-8, 1.7, 0.9), AdditiveCost(0.05, 4e-6, 1.6e-10, 0.001), 1.5, 0.01)
BY_LAW = StepTimeModel(PowerLaw(0.02, 1e-8, 1.7, 0.99), AdditiveCost(0.05, 4e-6, 1.6e-10), 0.01, 1.5)


@given(
    st.sampled_from([BY_SUM, BY_LAW]),
    st.integers(1, 200_000),
    st.floats(0.06, 100.0),
    st.floats(1.0, 1e7),
)
def test_no_batch_of_several_takes_longer_and_one_more_sample_would(
    step_time: StepTimeModel, length: int, target: float, m_mem: float
) -> None:
    size = TimeBudget(m_mem, target, step_time).batch_size(length)
    assert size >= 1
    if size > 1:
        assert step_time.predict(size, length) <= target * (1 + 1e-9) and size * length <= m_mem
    assert step_time.predict(size + 1, length) > target * (1 - 1e-9) or (size + 1) * length > m_mem


@pytest.mark.parametrize("step_time", [BY_SUM, BY_LAW])
def test_a_target_of_what_some_samples_take_has_room_for_these(step_time: StepTimeModel) -> None:
    for length in range(1000, 80_000, 790):
        for samples in (1, 2, 3, 7):
            target = float(step_time.predict(samples, length))
            assert TimeBudget(1e9, target, step_time).batch_size(length) == samples


def test_with_a_power_law_it_is_equation_2() -> None:
    lengths = np.array([16, 300, 1560, 14_040, 75_600])
    target = TimeBudget(1e6, 3.0, BY_LAW)
    papers = BY_LAW.budget(3.0, 1e6)
    assert target.batch_sizes(lengths).tolist() == papers.batch_sizes(lengths).tolist()
    assert target.room(1560) == pytest.approx(papers.room(1560)) and target.p == papers.p
    assert target.cost(2, 1560) == pytest.approx(BY_LAW.predict(2, 1560))


def test_where_the_sum_is_better_it_is_followed() -> None:
    budget = TimeBudget(1e6, 3.0, BY_SUM)
    assert budget.room(1560) == pytest.approx((3.0 - 0.05) / (0.001 + 1560 * 4e-6 + 1560**2 * 1.6e-10))
    assert str(budget) == "target_sync = 3 s by the sum"


def test_memory_alone_takes_no_heed_of_time() -> None:
    for budget in (TimeBudget(1000, 3.0, BY_SUM), BucketBudget(1000, 5.0, 1.7)):
        assert budget.memory_alone() == BucketBudget(1000, math.inf, 1.7)
        assert budget.exceeds_memory(1001) and not budget.exceeds_memory(1000)


def test_calibrations_keep_either_kind() -> None:
    for budget in (
        TimeBudget(1000, 3.0, BY_SUM),
        TimeBudget(1000, 3.0, BY_SUM, overhead_tokens=80.5),
        BucketBudget(1000, 5.0, 1.7),
        BucketBudget(1000, 5.0, 1.7, overhead_tokens=80.5),
        BucketBudget(1000, math.inf),
    ):
        kept = Calibration(budget, BY_SUM)
        assert Calibration.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept


@pytest.mark.parametrize(
    ("budget", "limit"),
    [(TimeBudget(1000, math.inf, BY_SUM), "target_sync"), (BucketBudget(1000, math.inf, 1.7), "m_comp")],
)
def test_no_limit_is_null_in_the_log_of_a_run(budget: Budget, limit: str) -> None:
    assert read_budget(budget.to_dict() | {limit: None}) == budget


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="m_mem must be a positive number"):
        TimeBudget(0, 1.0, BY_SUM)
    with pytest.raises(ValueError, match=r"m_mem=inf.* positive number"):
        TimeBudget(math.inf, 1.0, BY_SUM)  # peaks and balance="equal_token" need a number
    with pytest.raises(ValueError, match=r"target_sync=0\.05 s is not above the 0\.05 s"):
        TimeBudget(10, 0.05, BY_SUM)
