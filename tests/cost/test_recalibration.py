"""From observed times to budgets; the loop is simulated with the real planner."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.callbacks.recalibration import LONGEST, power_law, replayed_world, simulate, world_of, wrong
from benchmarks.callbacks.replayed_costs import ReplayedCosts
from lightning_videoscale.cost import (
    TRANSFORMERS,
    BucketBudget,
    Calibration,
    Measurement,
    Recalibration,
    StepTimeModel,
    TimeBudget,
)
from lightning_videoscale.cost.step_time import AdditiveCost
from tests.data.planning.tables import footage

LENGTHS = (256, 1560, 4096, 8190, 14_040, 32_760, 75_600)
TRUTH = power_law(0.02, 0.98 / LONGEST**1.9, 1.9)


def window(
    speeds: tuple[float, ...], truth: Any = TRUTH, noise: float = 0.02, seed: int = 0, slots: int = 20
) -> list[Measurement]:
    """Every rank trains the same number of micro-batches of drawn shapes."""
    draw = np.random.default_rng(seed)
    observed = []
    for rank, speed in enumerate(speeds):
        for length in draw.choice(LENGTHS, slots):
            samples = draw.integers(1, max(2, LONGEST // length))
            seconds = truth.predict(samples, length) * speed * math.exp(noise * draw.standard_normal())
            observed.append(Measurement(int(samples), int(length), float(seconds), dp_rank=rank))
    return observed


def start(step_time: Any = TRUTH, target_sync: float | None = 1.0) -> Recalibration:
    return Recalibration(Calibration(TimeBudget(2 * LONGEST, 1.0, step_time), step_time), target_sync, LONGEST)


@pytest.mark.parametrize(
    ("micro_batches", "factor", "p_error"), [(4, 2.0, 0.3), pytest.param(1, 0.5, -0.3, marks=pytest.mark.full)]
)
def test_wrong_costs_are_corrected_and_stay_so(micro_batches: int, factor: float, p_error: float) -> None:
    world = world_of(footage(), 20_000, 1.9, dp_size=4, micro_batches=micro_batches)
    result = simulate(world, wrong(world.truth, factor, p_error), steps=2000)
    room, cv, oracle_cv = (np.array(result[name]) for name in ("room", "cv", "oracle_cv"))
    assert abs(math.log(room[0] / result["oracle_room"])) > 0.6
    assert np.abs(room[199:] / result["oracle_room"] - 1).max() < 0.05
    assert cv[:20].mean() > 1.3 * oracle_cv[:20].mean()
    assert cv[200:].mean() < 1.3 * oracle_cv[200:].mean()
    late = [change for change in result["changes"] if change["step"] > 200]
    assert len(late) <= 3, late
    assert result["speeds"][world.slow_rank] == pytest.approx(world.slowness, rel=0.05)


@pytest.mark.parametrize("has_target", [True, False])
def test_measured_costs_are_found_by_step_100(has_target: bool) -> None:
    """From a factor of 2 and p off by 0.3, on what an H200 was measured to take, which is no formula."""
    world = replayed_world(footage(), 20_000, has_target, dp_size=4, micro_batches=4)
    first = wrong(world.truth, 2.0, 0.3)
    runs = [simulate(replace(world, seed=seed), first, steps=100) for seed in range(3)]
    cv, oracle_cv = (np.mean([run[name] for run in runs], axis=0) for name in ("cv", "oracle_cv"))
    assert cv[:20].mean() > 3 * oracle_cv[:20].mean()
    assert cv[80:].mean() < 1.3 * oracle_cv[80:].mean()
    assert runs[0]["room"][99] == pytest.approx(runs[0]["oracle_room"], rel=0.02)


def test_the_replayed_clock_is_what_was_measured() -> None:
    clock = ReplayedCosts.load()
    samples, lengths, seconds, _ = clock.points
    assert clock.predict(samples, lengths) == pytest.approx(seconds)
    assert seconds[-1] == pytest.approx(11.59, abs=0.01) and (samples[-1], lengths[-1]) == (1, LONGEST)
    between = clock.predict(samples, 1.2 * lengths) / clock.fit.predict(samples, 1.2 * lengths)
    assert between.min() > 0.8 and between.max() < 1.2 and np.ptp(between) > 0.01, "near the fit, and not on it"
    factors = clock.noise(samples, lengths, np.random.default_rng(0))
    assert (factors >= 1).all() and (factors <= 1 + clock.spreads).all() and np.ptp(factors) > 0.1


def test_a_resumed_calibration_goes_on_as_if_it_had_not_stopped() -> None:
    world = world_of(footage(), 5_000, 2.0, dp_size=4)
    first = wrong(world.truth, 2.0, 0.3)
    whole, resumed = (simulate(world, first, steps=120, stop=stop) for stop in (None, 60))
    assert resumed == whole


def test_steps_that_wait_for_the_host_make_a_fit_no_more_certain() -> None:
    launch, device, longest = 0.12, AdditiveCost(0.0, 2e-5, 7e-10), 32_000
    first = StepTimeModel.analytic(TRANSFORMERS["wan2.1-1.3b"])
    p = first.power_law.p

    def launched(seed: int) -> list[Measurement]:
        draw = np.random.default_rng(seed)
        lengths = draw.choice([256, 512, 1024, 2048, 4096, 8192, 16_384, 24_000, longest], 80)
        samples = np.where(lengths > 8000, draw.integers(1, 3, 80), draw.integers(1, 5, 80))
        seconds = np.maximum(launch, device.predict(samples, lengths)) * np.exp(0.08 * draw.standard_normal(80))
        columns = zip(samples.tolist(), lengths.tolist(), seconds.tolist(), strict=True)
        return [Measurement(*load, dp_rank=n % 2) for n, load in enumerate(columns)]

    changes = []
    for run in range(4):
        loop = Recalibration(Calibration(BucketBudget(2 * longest, longest**p, p), first), longest=longest)
        changes += [loop.update(launched(100 * run + n)).changed for n in range(30)][12:]
        assert loop.fitted is not None and loop.fitted.floor == pytest.approx(launch, rel=0.05)
    assert sum(changes) <= 8, "of 72 windows in which nothing is new"


def test_a_slow_gpu_is_no_wrong_cost() -> None:
    for slowness in (1.15, 2.0):
        loop = start()
        for n in range(8):
            outcome = loop.update(window((1.0, 1.0, slowness, 1.0), seed=n))
            assert not outcome.changed, outcome.reason
            assert "slow" in outcome.reason and "rank 2" in outcome.reason
        assert loop.speeds[2] == pytest.approx(slowness, rel=0.03)
        assert loop.fitted is not None
        refitted = TimeBudget(1e6, 1.0, loop.fitted)
        assert refitted.room(LONGEST) == pytest.approx(loop.calibration.budget.room(LONGEST), rel=0.03)


def test_all_gpus_slower_is_a_wrong_cost() -> None:
    loop = start()
    for n in range(12):
        loop.update(window((1.3, 1.3, 1.3), seed=n))
    slower = power_law(0.02 * 1.3, TRUTH.power_law.b * 1.3, 1.9)
    right = TimeBudget(1e6, 1.0, slower)
    for length in LENGTHS[2:]:
        assert loop.calibration.budget.room(length) == pytest.approx(right.room(length), rel=0.05)
    assert all(speed < 1.05 for speed in loop.speeds.values())


def test_wild_times_count_nothing() -> None:
    calm, wild = start(), start()
    for n in range(3):
        observed = window((1.0, 1.0, 1.0, 1.0), seed=n)
        calm.update(observed)
        wild.update([o._replace(seconds=o.seconds * (20 if i % 10 == 0 else 1)) for i, o in enumerate(observed)])
    assert wild.fitted is not None and calm.fitted is not None
    assert wild.fitted.power_law.p == pytest.approx(calm.fitted.power_law.p, abs=0.01)
    assert wild.fitted.predict(1, LENGTHS) == pytest.approx(calm.fitted.predict(1, LENGTHS), rel=0.02)


def test_one_window_moves_the_budget_a_little() -> None:
    first = wrong(TRUTH, 4.0, 0.3)
    loop = start(first)
    before = loop.calibration.budget
    after = loop.update(window((1.0, 1.0))).calibration.budget
    assert 1 < after.room(LONGEST) / before.room(LONGEST) <= 1.5 * (1 + 1e-9)
    by_m_comp = Recalibration(Calibration(first.budget(1.0, 2 * LONGEST), first))
    before = by_m_comp.calibration.budget
    after = by_m_comp.update(window((1.0, 1.0))).calibration.budget
    assert before.p - after.p == pytest.approx(0.08)


def test_a_target_that_is_named_goes_before_that_of_a_checkpoint() -> None:
    state = json.loads(json.dumps(start().state_dict()))
    for named, wanted in ((2.0, 2.0), (None, 1.0)):
        loop = start(target_sync=named)
        loop.load_state_dict(state)
        for n in range(4):
            loop.update(window((1.0, 1.0), seed=n))
        assert loop.calibration.budget.numbers["target_sync"] == wanted


def test_without_a_target_the_longest_sample_keeps_setting_it() -> None:
    first = Calibration(BucketBudget(2 * LONGEST, LONGEST**2.2, 2.2), wrong(TRUTH, 0.5, 0.3))
    loop = Recalibration(first)
    for n in range(8):
        loop.update(window((1.0, 1.0), seed=n))
    budget = loop.calibration.budget
    assert budget.p == pytest.approx(1.9, abs=0.01)
    assert budget.batch_size(LONGEST - 1) == 1
    assert budget.m_comp == pytest.approx(LONGEST**budget.p)
    unlimited = Recalibration(Calibration(BucketBudget(LONGEST, math.inf, 2.0), None))
    assert unlimited.update(window((1.0, 1.0))).calibration.budget.m_comp == math.inf


def test_a_target_counts_where_memory_alone_has_decided_so_far() -> None:
    loop = Recalibration(Calibration(BucketBudget(4 * LONGEST, math.inf, 2.0)), 1.0, LONGEST)
    rooms = []
    for n in range(6):
        loop.update(window((1.0, 1.0), seed=n))
        rooms.append(loop.calibration.budget.room(LONGEST))
    assert rooms[0] == pytest.approx(4 / 1.5)  # from as many as memory allows, step by step
    assert loop.calibration.budget.numbers["target_sync"] == 1.0
    assert rooms[-1] == pytest.approx(1.0, rel=0.03)


def test_the_longest_sample_of_a_budget_without_m_comp_is_m_mem() -> None:
    loop = Recalibration(Calibration(BucketBudget(2 * LONGEST, math.inf, 2.0)))
    outcome = loop.update(window((1.0, 1.0)))
    assert loop.fitted is not None and outcome.calibration.step_time is loop.fitted
    assert outcome.calibration.budget == BucketBudget(2 * LONGEST, math.inf, loop.fitted.power_law.p)
    assert not loop.update(window((1.0, 1.0), seed=1)).changed


def test_without_a_target_there_is_room_for_as_many_of_the_longest_samples_as_at_first() -> None:
    first = Calibration(BucketBudget(4 * LONGEST, 2 * LONGEST**2.2, 2.2), wrong(TRUTH, 0.5, 0.3))
    loop = Recalibration(first, longest=LONGEST)
    for n in range(8):
        loop.update(window((1.0, 1.0), seed=n))
        assert loop.calibration.budget.batch_size(LONGEST) == 2
    budget = loop.calibration.budget
    assert budget.p == pytest.approx(1.9, abs=0.01) and budget.m_comp == pytest.approx(2 * LONGEST**budget.p)
    by_one_sample = Recalibration(first)
    for n in range(8):
        by_one_sample.update(window((1.0, 1.0), seed=n))
    assert by_one_sample.calibration.budget.batch_size(LONGEST) == 1


@pytest.mark.parametrize("samples", [3, 5, 6, 7])
def test_rounding_takes_no_sample_of_the_longest(samples: int) -> None:
    lengths = [length for length in range(70_000, 76_000) if samples * length**1.92 / length**1.92 < samples]
    assert lengths, "where M_comp over S^p is less than what it was multiplied by"
    for longest in lengths[:3]:
        budget = BucketBudget(10.0 * longest, float(samples * longest**2), 2.0)
        outcome = Recalibration(Calibration(budget), longest=longest).update(window((1.0, 1.0)))
        assert outcome.calibration.budget.p == 1.92  # as near to 1.9 as one window takes it
        assert outcome.calibration.budget.batch_size(longest) == samples


def test_too_little_to_tell_changes_nothing_and_says_so() -> None:
    for observed, reason in (
        ([], "no times were observed"),
        ([Measurement(1, 100, math.nan)], "no times were observed"),
        ([Measurement(1, 100, 0.1)] * 9, "1 shapes of 1 sequence lengths"),
        (window((1.0,), power_law(2.0, TRUTH.power_law.b, 1.9)), "target_sync=1.0 s is not above the 2"),
    ):
        loop = start()
        outcome = loop.update(observed)
        assert not outcome.changed and reason in outcome.reason


def test_peaks_move_the_memory_budget_step_by_step() -> None:
    loop = start()
    peaks = {tokens: 2e10 + 2e5 * tokens for tokens in (20_000, 60_000, 100_000)}
    fits = (8e10 * 0.92 - 2e10) / 2e5
    seen = []
    for _ in range(6):
        outcome = loop.update(window((1.0, 1.0)), peaks, capacity=8e10)
        seen.append(outcome.calibration.budget.m_mem)
    assert seen[0] == 2 * LONGEST * 1.25 and "M_mem from 151200 to 189000" in loop_reason(peaks)
    assert seen[-1] == pytest.approx(fits, rel=0.1)
    assert sorted(seen) == seen


def loop_reason(peaks: dict[int, float]) -> str:
    return start().update(window((1.0, 1.0)), peaks, capacity=8e10).reason


@pytest.mark.parametrize("target_sync", [None, 20.0])
def test_what_samples_take_beside_their_tokens_stays_in_the_budget(target_sync: float | None) -> None:
    first = Calibration(BucketBudget(2 * LONGEST, LONGEST**1.9, 1.9, overhead_tokens=80), wrong(TRUTH, 2.0, 0.3))
    loop = Recalibration(first, target_sync, longest=LONGEST)
    outcome = loop.update(window((1.0, 1.0)), {n: 1e9 + n for n in (1000, 2000, 3000)}, capacity=8e10)
    assert outcome.changed and outcome.calibration.budget.m_mem > 2 * LONGEST
    assert outcome.calibration.budget.overhead_tokens == 80


@pytest.mark.parametrize("longest", [LONGEST, None])
def test_what_memory_had_room_for_is_with_what_samples_take_beside_their_tokens(longest: int | None) -> None:
    """One sample of the longest, not two, so that a target of 0.8 s instead of 1 s is no more than may change."""
    first = Calibration(BucketBudget(2 * LONGEST, math.inf, overhead_tokens=LONGEST))
    budget = Recalibration(first, 0.8, longest).update(window((1.0, 1.0))).calibration.budget
    assert isinstance(budget, TimeBudget) and budget.target_sync == 0.8


@pytest.mark.parametrize(("share", "is_lowered"), [(0.99, False), (1.01, True)])
def test_a_memory_budget_that_does_not_fit_is_lowered_however_little(share: float, is_lowered: bool) -> None:
    """Less than the tolerance above what leaves the reserve free."""
    loop = start()
    per_token = share * 8e10 / (2 * LONGEST)
    outcome = loop.update([], {n: 1.0 + per_token * n for n in (20_000, 40_000, 60_000)}, capacity=8e10)
    assert outcome.changed is is_lowered
    fits = 0.92 * 8e10 / per_token if is_lowered else 2 * LONGEST
    assert outcome.calibration.budget.m_mem == pytest.approx(fits, abs=1)


def test_a_gpu_without_room_for_a_token_lowers_the_memory_budget() -> None:
    loop = start()
    peaks = {tokens: 76e9 + 3e4 * tokens for tokens in (20_000, 60_000, 100_000)}
    outcome = loop.update([], peaks, capacity=8e10)
    assert outcome.calibration.budget.m_mem == int(2 * LONGEST / 1.25)
    assert "M_mem from 151200 to 120960" in outcome.reason and "70.8 of 74.5 GiB" in outcome.reason
    for _ in range(60):
        loop.update([], peaks, capacity=8e10)
    assert loop.calibration.budget.m_mem == 1
    for _ in range(80):  # what else was on the GPU has ended
        loop.update([], peaks, capacity=16e10)
    assert loop.calibration.budget.m_mem == pytest.approx(2.37e6, rel=0.11)


def test_after_an_out_of_memory_peaks_cannot_raise_the_budget_again() -> None:
    loop = start()
    loop.limit_memory(50_000)
    assert loop.calibration.budget.m_mem == 50_000
    loop.update(window((1.0, 1.0)), {n: 1e9 + n for n in (1000, 2000, 3000)}, capacity=8e10)
    assert loop.calibration.budget.m_mem == 50_000
    resumed = start()
    resumed.load_state_dict(json.loads(json.dumps(loop.state_dict())))
    assert resumed.calibration == loop.calibration
    assert resumed.update([], {n: 1e9 + n for n in (1000, 2000, 3000)}, 8e10).calibration.budget.m_mem == 50_000
