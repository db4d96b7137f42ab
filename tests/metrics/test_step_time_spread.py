"""StepTimeSpread against values computed by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.metrics import StepTimeSpread


def test_mean_over_steps_of_max_minus_min_over_max() -> None:
    spread = StepTimeSpread()
    spread.update(torch.tensor([2.0, 1.0, 1.5]))  # (2 - 1) / 2 = 0.5
    spread.update(torch.tensor([4.0, 3.0, 4.0]))  # (4 - 3) / 4 = 0.25
    assert spread.compute().item() == 0.375
    assert spread.compute().dtype == torch.float64


def test_several_steps_at_once_are_several_steps() -> None:
    spread = StepTimeSpread()
    spread.update(torch.tensor([[2.0, 4.0], [1.0, 3.0], [1.5, 4.0]]))  # 0.5 and 0.25
    assert spread.compute().item() == 0.375 and spread.steps == 2


def test_sequence_lengths_may_stand_in_for_times() -> None:
    spread = StepTimeSpread()
    spread.update(torch.tensor([32_760, 8_190]))
    assert spread.compute().item() == 0.75


def test_a_single_rank_has_no_spread() -> None:
    spread = StepTimeSpread()
    spread.update(torch.tensor([3.0]))
    assert spread.compute().item() == 0.0


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nan_before_the_first_step_and_after_reset() -> None:
    spread = StepTimeSpread()
    assert math.isnan(spread.compute())
    spread.update(torch.tensor([2.0, 1.0]))
    spread.reset()
    assert math.isnan(spread.compute())


@given(st.lists(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3), min_size=2, max_size=8), st.floats(0.1, 10.0))
def test_states_merge_by_adding_and_units_cancel(steps: list[list[float]], unit: float) -> None:
    together, first, rest = StepTimeSpread(), StepTimeSpread(), StepTimeSpread()
    for index, times in enumerate(steps):
        together.update(torch.tensor(times, dtype=torch.float64))
        (first if index == 0 else rest).update(torch.tensor(times, dtype=torch.float64) * unit)
    first.merge_state(rest)
    torch.testing.assert_close(first.compute(), together.compute())


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (torch.ones(2, 3, 1), r"shape \(2, 3, 1\)"),
        (torch.ones(0), r"shape \(0,\)"),
        (torch.tensor([1.0, 0.0]), r"positive and finite; got \[1.0, 0.0\]"),
        (torch.tensor([1.0, math.nan]), "positive and finite"),
    ],
)
def test_refuses_what_is_not_one_positive_time_per_rank(times: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepTimeSpread().update(times)
