"""What `benchmarks/data/learning.py` makes of its curves."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.data.learning_curves import judge, seconds_to

STEPS = range(0, 101, 10)


def row(balance: str, seed: int, offset: float, pace: float, **others: Any) -> dict[str, Any]:
    """A run whose loss falls with its samples from 2 towards 1, ten samples a step."""
    return {
        "balance": balance, "seed": seed, "fused": True, "sp": 1,
        "samples": [10 * step for step in STEPS],
        "seconds": [pace * step for step in STEPS],
        "losses": [2 - step / 100 + offset for step in STEPS],
    } | others  # fmt: skip


def seeds(balance: str, offset: float, pace: float) -> list[dict[str, Any]]:
    """Three runs, a tenth apart in their losses."""
    return [row(balance, seed, offset + 0.05 * (seed - 1), pace) for seed in range(3)]


def test_planned_that_learns_as_well_in_less_time() -> None:
    found = judge([*seeds("planned", 0.01, 0.8), *seeds("equal_token", 0.0, 1.0)], "losses")
    assert found["per_sample"]["within_spread"] and found["per_sample"]["share_within_spread"] == 1
    assert found["per_second"]["ahead"] and found["per_second"]["samples_per_second_over_equal_token"] == 1.25
    assert found["per_second"]["planned_seconds"][2] == 80  # the seed that comes least far tells the level
    assert found["per_second"]["equal_token_seconds"][0] < 100


def test_planned_that_learns_worse_is_outside_of_the_spread() -> None:
    found = judge([*seeds("planned", 0.2, 1.2), *seeds("equal_token", 0.0, 1.0)], "losses")
    assert found["per_sample"]["share_within_spread"] == 0 and not found["per_sample"]["within_spread"]
    assert not found["per_second"]["ahead"]


def test_other_runs_are_held_against_planned_of_their_seed() -> None:
    plain = [*seeds("planned", 0.0, 0.8), *seeds("equal_token", 0.0, 1.0)]
    found = judge([*plain, row("planned", 0, -0.05, 1.0, fused=False), row("planned", 0, 0.1, 1.0, sp=2)], "losses")
    assert found["kernels off"]["relative_gap"] == 0 and found["kernels off"]["within_spread"]
    assert found["sp = 2"]["share_within_spread"] == 0


def test_nothing_is_said_of_one_seed() -> None:
    assert judge([row("planned", 0, 0.0, 1.0), row("equal_token", 0, 0.0, 1.0)], "losses") == {}


def test_the_time_of_a_loss_lies_between_two_validations() -> None:
    assert seconds_to(row("planned", 0, 0.0, 1.0), 1.65) == pytest.approx(35)


def test_either_curve_of_the_runs_is_judged() -> None:
    planned = [row | {"averaged_losses": [0.9 * loss for loss in row["losses"]]} for row in seeds("planned", 0.2, 1.0)]
    equal = [row | {"averaged_losses": row["losses"]} for row in seeds("equal_token", 0.0, 1.0)]
    gaps = [judge([*planned, *equal], curve)["per_sample"]["relative_gap"] for curve in ("losses", "averaged_losses")]
    assert gaps[0] > 0.1 and -0.1 < gaps[1] < 0.1
