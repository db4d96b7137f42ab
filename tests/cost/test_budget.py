"""Equation 2 of AdaptiveLoad, to the letter."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.cost import BucketBudget, Calibration


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (100, 10),  # memory: 1000 / 100; compute would allow 20
        (200, 5),  # both: 1000 / 200 and 200_000 / 40_000
        (300, 2),  # compute: 200_000 / 90_000 = 2.2; memory would allow 3
        (500, 1),  # compute: 0.8, but never less than one
        (1000, 1),  # memory: exactly one
        (5000, 1),  # neither holds it
    ],
)
def test_the_tighter_constraint_decides(length: int, size: int) -> None:
    assert BucketBudget(m_mem=1000, m_comp=200_000, p=2).batch_size(length) == size


@given(
    st.integers(1, 200_000),
    st.floats(1, 1e7),
    st.floats(1, 1e14),
    st.floats(1.0, 2.4),
)
def test_no_batch_of_several_samples_exceeds_a_budget(length: int, m_mem: float, m_comp: float, p: float) -> None:
    budget = BucketBudget(m_mem, m_comp, p)
    size = budget.batch_size(length)
    assert size == max(1, min(math.floor(m_mem / length), math.floor(m_comp / length**p * (1 + 1e-13))))
    if size > 1:
        assert size * length <= m_mem * (1 + 1e-12)
        assert budget.cost(size, length) <= m_comp * (1 + 1e-12)


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 7, 13])
def test_rounding_costs_no_sample(samples: int) -> None:
    """Of 1 000 lengths, a tenth had room for 2.9999999999999996 samples where it was for 3."""
    for length in range(1000, 80_000, 79):
        assert BucketBudget(m_mem=1e9, m_comp=samples * length**1.9, p=1.9).batch_size(length) == samples


def test_infinite_compute_leaves_memory_to_decide() -> None:
    assert BucketBudget(m_mem=1000, m_comp=math.inf).batch_size(10) == 100


def test_a_sample_that_exceeds_memory_is_known() -> None:
    budget = BucketBudget(m_mem=1000, m_comp=1e9)
    assert [budget.exceeds_memory(length) for length in (999, 1000, 1001)] == [False, False, True]


@given(st.integers(1, 200_000), st.floats(1, 1e7), st.floats(0, 5000))
def test_what_samples_take_beside_their_tokens_counts_in_memory(length: int, m_mem: float, overhead: float) -> None:
    budget = BucketBudget(m_mem, math.inf, overhead_tokens=overhead)
    size = budget.batch_size(length)
    assert budget.memory_tokens(size + 1, length) > m_mem
    assert size == 1 or budget.memory_tokens(size, length) <= m_mem * (1 + 1e-12)
    assert budget.exceeds_memory(length) == (length + overhead > m_mem)
    assert budget.memory_alone() == budget


def test_without_an_overhead_checkpoints_are_those_of_earlier_releases() -> None:
    assert BucketBudget(1000, 2e5).to_dict() == {"m_mem": 1000, "m_comp": 2e5, "p": 2.0}
    assert BucketBudget(1000, 2e5, overhead_tokens=8).to_dict()["overhead_tokens"] == 8


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, "8"])
def test_an_overhead_is_a_number_of_tokens(wrong: Any) -> None:
    with pytest.raises(ValueError, match="overhead_tokens"):
        BucketBudget(1000, 2e5, overhead_tokens=wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    """They ended in an error of JSON where a budget is named by its version, or kept."""
    budget = BucketBudget(np.int64(1000), np.float32(2e5), np.float64(2.0))  # type: ignore[arg-type]
    assert Calibration(budget).version == Calibration(BucketBudget(1000, 2e5)).version
    assert json.loads(json.dumps(budget.to_dict())) == {"m_mem": 1000, "m_comp": 2e5, "p": 2.0}


@pytest.mark.parametrize(
    "wrong", [{"m_mem": 0}, {"m_comp": -1}, {"p": 0}, {"m_mem": math.nan}, {"m_mem": math.inf}, {"m_mem": "8e4"}]
)
def test_budgets_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        BucketBudget(**({"m_mem": 1.0, "m_comp": 1.0} | wrong))
