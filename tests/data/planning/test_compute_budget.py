"""Which compute budget is found, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.planning import BucketPlanner, SampleTable, compute_budget
from lightning_videoscale.data.planning.compute_budget import FACTORS, TriedBudget, best_of, try_budgets
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.shapes import ClipShape
from tests.data.planning.tables import BUDGET, WAN_14B, mixed

# A sample of 80 tokens costs 6400, three of 41 tokens 5043 and four 6724, for which 1.05 x 6400 has no room yet.
PAIRS = SampleTable.create(
    [ClipShape(5, 8, 8, latents=True), ClipShape(1, 2, 82, latents=True)],
    np.array([80, 41]),
    np.random.default_rng(0).permutation(np.arange(1200, dtype=np.int32) % 4 > 0).astype(np.int32),
)
ALONE = BucketBudget(m_mem=240, m_comp=80.0**2)


def test_the_budget_is_found_under_which_unlike_shapes_cost_the_same() -> None:
    planner = BucketPlanner(PAIRS, ALONE, dp_size=2)
    tried = try_budgets(planner)
    best = best_of(tried)
    assert best.factor == 1.1 and best.budget == BucketBudget(240, 1.1 * 80.0**2)
    assert tried[0].budget == ALONE and tried[0].figures.efficiency < 0.95 < 0.97 < best.figures.efficiency
    assert best.figures == PlanFigures.of(replace(planner, budget=best.budget).plan(0))
    assert try_budgets(planner) == tried, "the same on every rank"


def test_what_a_sample_of_the_epoch_tells_holds_for_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_budget, "_DRAWS", 8_000)
    planner = BucketPlanner(mixed(40_000), replace(BUDGET, m_mem=2.5 * BUDGET.m_mem), dp_size=8, step_time=WAN_14B)
    tried = try_budgets(planner)
    worst = min(tried, key=lambda each: each.figures.throughput())
    for each in (best_of(tried), worst):
        epoch = PlanFigures.of(replace(planner, budget=each.budget).plan(0))
        assert each.figures.samples == 8_000 and epoch.samples == 40_000
        assert epoch.throughput() == pytest.approx(each.figures.throughput(), rel=0.01)
    assert best_of(tried).figures.throughput() > 1.03 * worst.figures.throughput()


def test_a_hundredth_of_diversity_decides_only_where_diversity_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = BucketPlanner(mixed(2_000), replace(BUDGET, m_mem=2.5 * BUDGET.m_mem), dp_size=8, step_time=WAN_14B)
    monkeypatch.setattr(compute_budget, "ENOUGH", 0.9)  # more than there is: the smallest budget's decides
    for asked, are_equal in ((None, True), (1.0, False)):
        first, *others = try_budgets(replace(planner, min_diversity=asked))
        lacking = [first.figures.diversity - each.figures.diversity for each in others]
        assert any(0 < less < 0.02 for less in lacking)
        assert [each.is_diverse for each in others] == [less <= (0.02 if are_equal else 0) for less in lacking]


@pytest.mark.parametrize(
    ("planner", "number"),
    [
        (BucketPlanner(PAIRS, ALONE), 4),  # three of 41 tokens, four, five, and then two of 80
        (BucketPlanner(PAIRS, replace(ALONE, m_mem=80)), 1),
        (BucketPlanner(PAIRS, ALONE, "equal_token"), 1),
        (BucketPlanner(PAIRS, replace(ALONE, m_comp=float("inf"))), 1),
    ],
)
def test_only_budgets_that_make_other_batches_are_tried(planner: BucketPlanner, number: int) -> None:
    tried = try_budgets(planner)
    assert len(tried) == number and tried[0].factor == FACTORS[0] == 1
    assert best_of(tried) == tried[0], "one rank never waits, so the smallest is as good as any"


def test_datasets_are_sampled_by_their_weights() -> None:
    shapes = PAIRS.shape_id
    table = replace(PAIRS, source=shapes)  # one dataset per shape
    tokens = {
        weights: try_budgets(BucketPlanner(table, ALONE, source_weights=weights))[0].figures
        for weights in ((1.0, 999.0), (999.0, 1.0))
    }
    # Nearly all samples have 41 or 80 tokens, and cost as much each.
    found = [figures.tokens_per_cost for figures in tokens.values()]
    assert found == [pytest.approx(1 / 41, rel=0.01), pytest.approx(1 / 80, rel=0.01)]


def tried_with(factor: float, tokens: float, efficiency: float, slot_time: float = 1.0, **of: bool) -> TriedBudget:
    figures = PlanFigures(0, 0, 0, efficiency, slot_time, 0, 1, 0, 1, 1, tokens, 1, 1)
    return TriedBudget(factor, ALONE, figures, **({"is_diverse": True} | of))


def test_ties_go_to_the_smaller_budget_and_waiting_in_every_slot_is_counted_so() -> None:
    rows = [
        tried_with(1, tokens=90, efficiency=0.9, slot_time=1.25),  # 80 in slots
        tried_with(1.5, tokens=90.3, efficiency=0.95, slot_time=1 / 0.9),  # 85.5
        tried_with(2, tokens=85.6, efficiency=0.9, slot_time=1 / 0.9),
    ]
    assert [row.figures.throughput(in_slots=True) for row in rows] == pytest.approx([80, 85.55, 85.6], rel=1e-3)
    assert best_of(rows).factor == 1 and best_of(rows, in_slots=True).factor == 1.5


def test_speed_is_not_bought_with_steps_of_one_shape() -> None:
    assert best_of([tried_with(1, 90, 0.9), tried_with(1.5, 99, 0.99, is_diverse=False)]).factor == 1
    # Two of 80 tokens and five of 41 cost too different things to meet in a step.
    rows = try_budgets(BucketPlanner(PAIRS, ALONE, dp_size=2))
    assert rows[-1].factor == 2 and rows[-1].figures.efficiency > 0.99 and not rows[-1].is_diverse
    # What no budget has, none is asked for.
    alike = BucketPlanner(PAIRS, ALONE, dp_size=2, min_diversity=1.0)
    assert best_of(try_budgets(alike)).is_diverse


def test_many_ranks_plan_as_many_steps_as_tell_what_a_step_has() -> None:
    planner = BucketPlanner(mixed(100_000), BUDGET, dp_size=640, step_time=WAN_14B)
    found = [each.figures for each in try_budgets(planner)]
    # In one step, all shapes that there are would meet under any budget.
    assert found[0].steps >= 16 and min(figures.steps for figures in found) > 8
    assert found[0].samples < 100_000
