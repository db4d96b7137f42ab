"""Fits to weighted observations of a training run: what the host takes to launch a step must not bend them."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_videoscale.cost import TimeBudget
from lightning_videoscale.cost.points import Points
from lightning_videoscale.cost.weighted_fit import fit_power_law, fit_step_time

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def observed(launch: float, noise: float = 0.02) -> Points:
    """Seconds = 0.01 + 2e-5 S B + 7e-10 S² B on the device, or what the host takes, with noise on both."""
    draw = np.random.default_rng(0)
    b, s = np.array([(b, s) for s in LENGTHS for b in (1, 2, 4, 8) if b * s <= 140_000], np.float64).T
    device = (0.01 + b * (2e-5 * s + 7e-10 * s**2)) * (1 + noise * draw.standard_normal(len(b)))
    host = launch * (1 + 0.2 * draw.standard_normal(len(b)))
    return Points(b, s, np.maximum(device, host), draw.integers(1, 30, len(b)).astype(np.float64))


def test_launching_is_a_floor() -> None:
    points = observed(launch=0.15)
    model = fit_step_time(points)
    assert 0.13 < model.floor < 0.19 and model.predict(1, 300) == model.floor
    errors = np.abs(model.predict(points.samples, points.lengths) / points.seconds - 1)
    assert np.median(errors[points.seconds > 0.3]) < 0.02
    assert model.additive.linear == pytest.approx(2e-5, rel=0.1)
    assert model.additive.quadratic == pytest.approx(7e-10, rel=0.05)


def test_where_the_host_is_no_limit_short_steps_are_fitted_too() -> None:
    points = observed(launch=0.0)
    model = fit_step_time(points)
    assert model.additive.a == pytest.approx(0.01, rel=0.1)  # which long steps alone do not tell
    assert model.floor < 0.001


def test_times_that_shrink_with_the_work_have_no_law_but_their_mean() -> None:
    lengths = np.repeat([1000.0, 4000.0, 16_000.0, 64_000.0], 3)
    samples = np.tile([1.0, 2.0, 4.0], 4)
    falling = Points(samples, lengths, 1.0 + 0.1 / (samples * lengths), np.ones(12))
    law = fit_power_law(falling)
    assert law.b == 0 and law.a == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="do not grow with the work"):
        fit_step_time(falling)
    less = falling._replace(seconds=1e-9 * samples * lengths**2 - 5e-4)
    law = fit_power_law(less, (2.0, 2.0))
    assert law.a == 0 and law.b == pytest.approx(1e-9, rel=0.2), "no step takes less than no time"


def test_costs_of_samples_do_not_hide_that_times_grow_with_the_tokens() -> None:
    """Text that runs through all blocks costs a sample as much as 500 tokens, and short ones come in hundreds."""
    lengths = np.tile(np.geomspace(64, 4000, 12).round(), 2)
    samples = np.repeat([8000.0, 4000.0], 12) // lengths
    seconds = 0.002 + samples * (3e-4 + 6e-7 * lengths + 2e-11 * lengths**2)
    points = Points(samples, lengths, seconds, np.full(24, 20.0))
    assert fit_power_law(points.where(seconds > 2 * seconds.min())).b == 0
    model = fit_step_time(points)
    assert model.predict(samples, lengths) == pytest.approx(seconds, rel=1e-4)
    assert model.form is model.additive and model.power_law.b > 0


@pytest.mark.parametrize("seed", [138, *range(20)])
def test_a_fit_to_steps_that_all_wait_for_the_host_is_a_budget_or_refused(seed: int) -> None:
    """By noise alone the power law may grow a little, and the sum be a constant: no number of samples takes longer."""
    draw = np.random.default_rng(seed)
    samples, lengths = np.array([(b, s) for s in (256, 1024, 4096, 8192) for b in (1, 4)], np.float64).T
    samples[4:] = 1, 2, 1, 2
    seconds = 0.1 * np.exp(draw.choice([0.001, 0.02, 0.1]) * draw.standard_normal(8))
    try:
        model = fit_step_time(Points(samples, lengths, seconds, np.ones(8)))
    except ValueError as refused:
        assert "do not grow with the work" in str(refused)
    else:
        assert TimeBudget(1e5, 0.2, model).batch_size(256) >= 1
