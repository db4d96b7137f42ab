"""What the balances promise on the standard mix, simulated with predicted costs of Wan-14B on 16 ranks."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.data.planning.figures import PlanFigures, delays
from tests.data.planning.tables import BUDGET, WAN_14B, mixed, table_of

RANKS = 16


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, int], PlanFigures]:
    table = mixed(60_000)
    return {
        (balance, k): PlanFigures.of(BucketPlanner(table, BUDGET, balance, RANKS, k, WAN_14B).plan(0))
        for balance in ("equal_token", "dual_constraint", "planned")
        for k in (1, 4)
    }


def test_todays_practice_and_the_papers_are_as_far_apart_as_it_says(
    figures: dict[tuple[str, int], PlanFigures],
) -> None:
    equal_token, dual_constraint = figures["equal_token", 1], figures["dual_constraint", 1]
    assert 0.28 < equal_token.cost_cv < 0.45
    assert 0.12 < dual_constraint.cost_cv < 0.21
    assert equal_token.efficiency < 0.7 < 0.8 < dual_constraint.efficiency
    assert equal_token.diversity == pytest.approx(1, abs=0.1), (
        "what is drawn at random has as many shapes as random draws"
    )


def test_four_planned_micro_batches_cost_the_same_on_every_rank(figures: dict[tuple[str, int], PlanFigures]) -> None:
    planned = figures["planned", 4]
    assert planned.cost_cv < 0.01 and planned.efficiency > 0.99
    assert planned.slot_time < 1.05, "and every micro-batch of FSDP2 nearly so"
    assert planned.diversity > 0.8
    assert planned.delay_p99 < 30
    assert planned.padding == 0
    assert planned.tokens_per_cost > 1.25 * figures["equal_token", 4].tokens_per_cost


def test_one_planned_micro_batch_is_balanced_too(figures: dict[tuple[str, int], PlanFigures]) -> None:
    planned = figures["planned", 1]
    assert planned.cost_cv < 0.07 and planned.efficiency > 0.93
    assert planned.diversity > 0.8
    assert planned.delay_p99 < 30


def test_figures_of_a_plan_counted_by_hand() -> None:
    # Two ranks: one trains 4 samples of 4 tokens, the other 1 of 80; then the other way round or alike.
    plan = BucketPlanner(table_of([0] * 8 + [3] * 2), BucketBudget(80, 80**2, 2.0), dp_size=2).plan(0)
    costs = np.sort(plan.cost[plan.grid].sum(axis=2), axis=1)
    figures = PlanFigures.of(plan)
    assert figures.samples == 10
    assert figures.cv_step == pytest.approx(np.mean((costs[:, 1] - costs[:, 0]) / costs[:, 1]))
    assert figures.cost_cv == figures.compute_cv == pytest.approx(np.mean(costs.std(axis=1) / costs.mean(axis=1)))
    assert figures.efficiency == pytest.approx(costs.mean(axis=1).sum() / costs[:, 1].sum())


def test_weights_of_samples_counted_by_hand() -> None:
    # One rank: a step of 20 samples of 4 tokens, or one of 80, each with a gradient of its own.
    planner = BucketPlanner(table_of([0] * 40 + [3] * 2), BucketBudget(80, 1e9), "dual_constraint")
    figures = PlanFigures.of(planner.plan(0))
    mean = figures.steps / 42
    assert figures.steps == 4
    assert (figures.least_weight, figures.most_weight) == pytest.approx((1 / 20 / mean, 1 / mean))
    even = PlanFigures.of(replace(planner, loss_normalization="epoch").plan(0))
    assert (even.least_weight, even.most_weight) == pytest.approx((1, 1))


def test_delay_counts_from_the_place_in_the_stream() -> None:
    plan = BucketPlanner(table_of([3] * 12), BucketBudget(80, 1e9), "dual_constraint").plan(0)
    assert plan.steps == 12 and (delays(plan) == 0).all(), "one sample a step, in the order of the stream"
    rare = BucketPlanner(table_of([3] * 99 + [0]), BucketBudget(80, 1e9), "dual_constraint").plan(0)
    assert delays(rare).max() == pytest.approx(99 - np.flatnonzero(rare.stream == 99)[0])


def test_a_million_clips_for_a_thousand_ranks() -> None:
    tracemalloc.start()  # the process's own peak would be that of other tests
    table = mixed(1_000_000)
    for k, ranks, seconds_per_step in ((1, 1024, 0.1), (4, 1024, 0.1), (4, 16, 0.005)):
        started = time.process_time()
        plan = BucketPlanner(table, BUDGET, "planned", ranks, k, WAN_14B).plan(0)
        spent = time.process_time() - started
        assert spent < 60 and spent / plan.steps < seconds_per_step
        assert np.array_equal(np.sort(plan.members[: len(table)]), np.arange(len(table)))
        assert PlanFigures.of(plan).efficiency > 0.9
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 8 * len(table) < peak_bytes < 0.5e9, "with the half gigabyte of what is imported, far below 2 GB"
