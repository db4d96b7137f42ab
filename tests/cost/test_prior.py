"""What observations leave open of costs is kept as it was; what they tell is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_videoscale.cost import BucketBudget, Calibration, Measurement, Recalibration, StepTimeModel, TimeBudget
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.step_time import AdditiveCost, PowerLaw

# As measured of Wan-1.3B on one H200: benchmarks/results/cost/step_time_fit-h200.json.
TRUTH = AdditiveCost(0.0713, 3.699e-5, 1.520e-9, 0.00228)
TOKENS = 151_552
LENGTHS = TOKENS // 2 ** np.arange(1, 10)
"""75 776 to 296 tokens: each divides `TOKENS`."""


def held(factor: float, p: float | None = None) -> StepTimeModel:
    """Costs wrong by a factor, as the sum or as a power law."""
    whole = AdditiveCost(*(factor * term for term in (TRUTH.a, TRUTH.linear, TRUTH.quadratic, TRUTH.per_sample)))
    law = PowerLaw(factor * TRUTH.a, 1e-9, 2.0, 1.0)
    if p is None:
        return StepTimeModel(law, whole, 1.0, 0.0)
    b = factor * float(TRUTH.predict(1, LENGTHS[0])) / LENGTHS[0] ** p
    return StepTimeModel(PowerLaw(law.a, b, p, 1.0), whole, 0.0, 1.0)


def window(seed: int, is_constant: bool, noise: float = 0.02) -> list[Measurement]:
    """Two ranks' micro-batches: of `TOKENS` tokens each, or of batch sizes that vary at every length."""
    draw = np.random.default_rng(seed)
    observed = []
    for number, length in enumerate(draw.choice(LENGTHS, 60).tolist()):
        full = TOKENS // length
        samples = full if is_constant else int(draw.integers(1, full + 1))
        seconds = float(TRUTH.predict(samples, length)) * math.exp(noise * draw.standard_normal())
        observed.append(Measurement(samples, length, seconds, dp_rank=number % 2))
    return observed


def loop_from(step_time: StepTimeModel | None, budget: Budget | None = None) -> Recalibration:
    return Recalibration(Calibration(budget or BucketBudget(TOKENS, 1e12, 2.0), step_time), longest=int(LENGTHS[0]))


def worst_of_one_sample(loop: Recalibration) -> float:
    """By what factor one sample of some length is predicted wrongly."""
    assert loop.fitted is not None
    return float(np.exp(np.abs(np.log(loop.fitted.predict(1, LENGTHS) / TRUTH.predict(1, LENGTHS))).max()))


def test_a_constant_number_of_tokens_tells_constant_from_linear_costs_for_nobody() -> None:
    """The reason for all of this: two models that agree on what is observed, and not on one sample."""
    constant = AdditiveCost(TRUTH.a + TRUTH.linear * TOKENS, 0.0, TRUTH.quadratic, TRUTH.per_sample)
    assert constant.predict(TOKENS // LENGTHS, LENGTHS) == pytest.approx(TRUTH.predict(TOKENS // LENGTHS, LENGTHS))
    assert constant.predict(1, LENGTHS[-1]) > 60 * TRUTH.predict(1, LENGTHS[-1])


@pytest.mark.parametrize("budget", [None, TimeBudget(TOKENS, 12.0, held(2.0))])
def test_what_is_not_told_is_kept_and_said(budget: Budget | None) -> None:
    loop = loop_from(held(2.0), budget)
    for seed in range(5):
        outcome = loop.update(window(seed, is_constant=True))
        assert "B and S vary together" in outcome.reason
    assert worst_of_one_sample(loop) < 1.1, "the factor is told, the ratio of costs was right"
    full = TOKENS // LENGTHS
    assert loop.fitted is not None
    assert loop.fitted.predict(full, LENGTHS) == pytest.approx(TRUTH.predict(full, LENGTHS), rel=0.04)


def test_without_costs_the_budget_says_what_is_not_told() -> None:
    loop = loop_from(None)
    for seed in range(3):
        loop.update(window(seed, is_constant=True))
    assert worst_of_one_sample(loop) < 16, (
        "of samples that cost nothing together; a constant would be 60 times too much"
    )
    assert loop.fitted is not None and loop.fitted.predict(1, LENGTHS[-1]) < 0.5


@pytest.mark.parametrize("before", [held(2.0), held(2.0, p=1.9), held(0.5, p=1.3)])
def test_what_is_told_is_not_kept(before: StepTimeModel) -> None:
    loop = loop_from(before)
    for seed in range(5):
        assert "vary together" not in loop.update(window(seed, is_constant=False)).reason
    assert worst_of_one_sample(loop) < 1.25


def test_it_is_the_same_after_a_checkpoint() -> None:
    whole, resumed = loop_from(held(2.0)), loop_from(held(2.0))
    for loop in (whole, resumed):
        loop.update(window(0, is_constant=True))
    after = loop_from(held(3.0))
    after.load_state_dict(resumed.state_dict())
    assert after.update(window(1, is_constant=True)) == whole.update(window(1, is_constant=True))
    assert after.fitted == whole.fitted


def test_too_few_observations_are_not_made_enough() -> None:
    outcome = loop_from(held(2.0)).update([m for m in window(0, True) if m.sequence_length >= LENGTHS[2]])
    assert not outcome.changed and "needs 6 of 3" in outcome.reason
