"""The plan's promises, over random shapes, budgets, ranks and micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.cost import BucketBudget, StepTimeModel
from lightning_videoscale.data.planning import Balance, BucketPlanner, EpochPlan, MicroBatch
from lightning_videoscale.data.planning.figures import PlanFigures, delays
from lightning_videoscale.data.planning.plan import LossUnit
from lightning_videoscale.data.planning.stream import draws_before
from tests.data.planning.tables import BUDGET, LENGTHS, SHAPES, WAN_14B, mixed, table_of

planners = st.builds(
    BucketPlanner,
    table=st.builds(table_of, st.lists(st.integers(0, 4), min_size=1, max_size=120), st.integers(1, 9)),
    budget=st.builds(BucketBudget, st.floats(1, 1000), st.floats(1, 1e6), st.floats(1, 2.4)),
    balance=st.sampled_from(["planned", "dual_constraint", "equal_token"]),
    dp_size=st.integers(1, 6),
    micro_batches=st.integers(1, 5),
    step_time=st.sampled_from([None, WAN_14B]),
    loss_weighting=st.sampled_from(["sample", "token", "none"]),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
    shard_window=st.integers(1, 4),
    max_wait=st.none() | st.floats(1, 100),
)


def micro_batches(plan: EpochPlan) -> list[MicroBatch]:
    return [m for rank in range(plan.grid.shape[1]) for m in plan.micro_batches_of(rank)]


def trained(plan: EpochPlan) -> list[int]:
    return sorted(sample for m in micro_batches(plan) if m.meta.loss_weight != 0 for sample in m.samples)


@given(planners, st.integers(0, 3))
def test_every_sample_is_trained_on_exactly_once(planner: BucketPlanner, epoch: int) -> None:
    assert trained(planner.plan(epoch)) == list(range(len(planner.table)))


@pytest.mark.parametrize(
    ("micro_batches", "max_wait", "weighting"), [(1, 120.0, "sample"), (4, 4.0, "sample"), (3, 120.0, "none")]
)
def test_steps_come_in_the_order_of_the_stream(micro_batches: int, max_wait: float, weighting: LossUnit) -> None:
    """But for those that exchange micro-batches: of several a step, where samples may wait and batches count more."""
    planner = BucketPlanner(mixed(20_000), BUDGET, "planned", 8, micro_batches, WAN_14B, weighting, max_wait=max_wait)
    plan = planner.plan(0)
    first = plan.members[plan.starts[:-1]][plan.grid].mean(axis=(1, 2))[:-1]  # the last step may be filled up
    assert len(first) > 100 and (np.diff(first) >= 0).all()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_who_keeps_rare_shapes_company_waits_no_longer_than_may_be(k: int) -> None:
    """A band of 22 long clips takes others of the next cost from all over the epoch, not from its beginning."""
    table = table_of([3] * 22 + [2] * 2978)
    for seed in range(5):
        planner = BucketPlanner(table, BucketBudget(1, 1e9), dp_size=4, micro_batches=k, seed=seed, max_wait=10.0)
        assert np.abs(delays(planner.plan(0))).max() <= planner.max_wait


@given(planners)
def test_micro_batches_of_a_shape_are_counted_by_rank(planner: BucketPlanner) -> None:
    plan = planner.plan(0)
    kinds = [{m.meta[:5] for m in plan.micro_batches_of(rank)} for rank in range(planner.dp_size)]
    assert plan.micro_batches_per_shape == pytest.approx(plan.grid.size / sum(map(len, kinds)))


@given(planners, st.integers(0, 3), st.floats(0, 1), st.integers(1, 6), st.integers(1, 4), st.floats(1, 1000))
def test_what_is_left_of_an_epoch_is_planned_anew_for_other_ranks(
    planner: BucketPlanner, epoch: int, share: float, dp_size: int, k: int, m_mem: float
) -> None:
    before = planner.plan(epoch)
    steps = int(share * before.steps)
    other = replace(planner, dp_size=dp_size, micro_batches=k, budget=BucketBudget(m_mem, 1e6), balance="planned")
    done = before.done_after(steps)
    seen = [
        m
        for rank in range(planner.dp_size)
        for m in list(before.micro_batches_of(rank))[: steps * planner.micro_batches]
    ]
    first = [sample for m in seen if m.meta.loss_weight != 0 for sample in m.samples]
    assert sorted(before.stream[done]) == sorted(first)
    if done.all():
        return
    after = other.plan(epoch, done)
    assert sorted(first + trained(after)) == list(range(len(planner.table)))
    # And once more, from the middle of that.
    done = after.done_after(after.steps // 2)
    if not done.all():
        last = planner.plan(epoch, done)
        assert sorted([*last.stream[done].tolist(), *trained(last)]) == list(range(len(planner.table)))
        assert last.done_after(last.steps).all()


@given(planners)
def test_all_ranks_have_equally_many_whole_steps_in_every_epoch(planner: BucketPlanner) -> None:
    plans = [planner.plan(epoch) for epoch in range(3)]
    assert len({plan.grid.shape for plan in plans}) == 1
    assert plans[0].grid.shape[1:] == (planner.dp_size, planner.micro_batches)
    assert sorted(plans[0].grid.ravel()) == list(range(len(plans[0].cost)))
    assert plans[0].filler.sum() < planner.dp_size * planner.micro_batches


@given(planners, st.integers(0, 3))
def test_micro_batches_are_of_one_shape_and_within_the_budget(planner: BucketPlanner, epoch: int) -> None:
    budget = planner.budget
    for micro_batch in micro_batches(planner.plan(epoch)):
        meta = micro_batch.meta
        assert {SHAPES[planner.table.shape_id[s]][:3] for s in micro_batch.samples} == {
            (meta.frames, meta.height, meta.width)
        }
        assert meta.sequence_length == meta.frames * meta.height * meta.width // 4
        limit = budget.batch_size(meta.sequence_length)
        if planner.balance == "equal_token":
            limit = max(1, int(budget.m_mem // meta.sequence_length))
        assert meta.samples == len(micro_batch.samples) == len(micro_batch.starts) <= limit
        if planner.step_time is None:
            assert meta.predicted_cost == pytest.approx(budget.cost(meta.samples, meta.sequence_length))
        else:
            assert meta.predicted_cost == WAN_14B.predict(meta.samples, meta.sequence_length)


@given(planners, st.integers(0, 3))
def test_the_mean_over_ranks_and_micro_batches_is_the_mean_over_samples(planner: BucketPlanner, epoch: int) -> None:
    losses = np.random.default_rng(0).normal(size=len(planner.table))
    lengths = LENGTHS[planner.table.shape_id]
    plan = planner.plan(epoch)
    batches = {number: plan._micro_batch(number, 0.0).samples for number in range(len(plan.cost))}
    for grid, weight in zip(plan.grid, plan.weight, strict=True):
        counted = [s for n in grid.ravel().tolist() if not plan.filler[n] for s in batches[n]]
        assert counted, "no step is made of fillers alone"
        means = np.array([losses[list(batches[n])].mean() for n in grid.ravel().tolist()])
        weighted = (weight.ravel() * means).mean()
        if planner.loss_weighting == "sample":
            assert weighted == pytest.approx(losses[counted].mean(), abs=1e-12)
        elif planner.loss_weighting == "token":
            assert weighted == pytest.approx(np.average(losses[counted], weights=lengths[counted]), abs=1e-12)
        else:
            assert set(weight.ravel()) <= {0.0, 1.0}


@given(planners)
def test_plans_are_pure_and_epochs_differ(planner: BucketPlanner) -> None:
    assert planner.plan(1).digest == replace(planner).plan(1).digest
    if planner.shuffle and len(planner.table) > 20:
        assert planner.plan(0).digest != planner.plan(1).digest
        assert planner.plan(0).digest != replace(planner, seed=planner.seed ^ 1).plan(0).digest
    if not planner.shuffle:
        assert planner.plan(0).digest == planner.plan(7).digest


@pytest.mark.parametrize("seed", range(10, 16))
def test_planned_is_never_slower_than_the_others_on_a_handful_of_samples(seed: int) -> None:
    """At equal samples per step: above M_comp, ``equal_token`` would take more of them."""
    draw = np.random.default_rng(seed)
    for _ in range(10):
        table = table_of(draw.integers(0, 5, draw.integers(1, 60)).tolist())
        ranks, k = int(draw.integers(1, 9)), int(draw.integers(1, 5))
        cost, budget = (None, WAN_14B)[draw.integers(2)], BucketBudget(draw.uniform(1, 500), 1e12, draw.uniform(1, 2.4))
        planner = BucketPlanner(table, budget, "planned", ranks, k, cost, seed=seed)
        planned, *others = (PlanFigures.of(replace(planner, balance=balance).plan(0)) for balance in get_args(Balance))
        for other in others:
            assert (planned.steps, planned.samples) == (other.steps, other.samples)
            for in_slots in (False, True):
                assert planned.throughput(in_slots) >= other.throughput(in_slots) * (1 - 1e-8)


few = st.builds(
    BucketPlanner,
    table=st.builds(table_of, st.lists(st.integers(0, 4), min_size=1, max_size=200)),
    budget=st.builds(BucketBudget, st.floats(1, 500), st.floats(10, 1e5) | st.just(1e12), st.floats(1, 2.4)),
    dp_size=st.integers(1, 16),
    micro_batches=st.integers(1, 4),
    step_time=st.sampled_from([None, WAN_14B]),
    min_diversity=st.sampled_from([None, 0.0, 0.8, 1.0]),
    seed=st.integers(0, 2**63),
)


@given(few)
def test_planned_is_never_worse_than_drawing_alone_on_few_clips(planner: BucketPlanner) -> None:
    planned, alone = (
        PlanFigures.of(replace(planner, balance=balance).plan(0)) for balance in ("planned", "dual_constraint")
    )
    quicker = [planned.throughput(in_slots) / alone.throughput(in_slots) - 1 for in_slots in (False, True)]
    assert min(quicker) >= -1e-8
    assert (planned.steps, planned.samples, planned.padding) == (alone.steps, alone.samples, alone.padding)
    if max(quicker) <= 1e-8:
        assert planned.cost_cv <= alone.cost_cv + 1e-8 and planned.cv_step <= alone.cv_step + 1e-8


def test_a_diversity_that_is_asked_for_goes_before_equal_costs() -> None:
    planner = BucketPlanner(mixed(60_000), BUDGET, dp_size=256, step_time=WAN_14B)
    wanted = (0.0, 0.6, 0.8, 0.95)
    found = [PlanFigures.of(replace(planner, min_diversity=share).plan(0)) for share in wanted]
    for share, figures in zip(wanted, found, strict=True):
        assert figures.diversity >= share - 0.02
    assert found[0].cost_cv < found[2].cost_cv / 2 and found[0].efficiency > found[2].efficiency
    assert found[0].diversity < found[2].diversity < found[3].diversity
    by_default = PlanFigures.of(planner.plan(0))
    assert by_default.cost_cv < found[2].cost_cv and by_default.diversity < 0.78, "equal costs go first"


def test_the_stream_of_random_numbers_does_not_change() -> None:
    plan = BucketPlanner(table_of([0] * 8), BucketBudget(1, 1), seed=5).plan(epoch=3)
    # Written down once: an upgrade of numpy must not change what a resumed run trains on.
    assert [m.samples[0] for m in plan.micro_batches_of(0)] == plan.stream.tolist() == WRITTEN_DOWN


WRITTEN_DOWN = [0, 3, 2, 5, 6, 7, 1, 4]


def test_a_sample_without_a_shape_is_left_out() -> None:
    assert trained(BucketPlanner(table_of([0, -1, 2, -1, 4]), BucketBudget(100, 1e6), dp_size=2).plan(0)) == [0, 2, 4]


def test_batches_are_divided_before_a_sample_is_repeated() -> None:
    # Five batches of four for two ranks: six of three or four, nothing is repeated.
    sizes = Counter(
        m.meta.samples
        for m in micro_batches(BucketPlanner(table_of([0] * 20), BucketBudget(16, 1e9), dp_size=2).plan(0))
    )
    assert sizes == {4: 2, 3: 4}
    # Three single samples for two ranks: the cheapest is repeated, with weight 0.
    plan = BucketPlanner(table_of([2, 0, 2]), BucketBudget(1, 1), dp_size=2).plan(0)
    assert [m.samples for m in micro_batches(plan) if m.meta.loss_weight == 0] == [(1,)]


def test_a_bucket_is_filled_to_the_brim_or_divided_evenly() -> None:
    budget = BucketBudget(4 * 10, 1e9)
    sizes = [
        sorted(m.meta.samples for m in micro_batches(BucketPlanner(table_of([0] * 31), budget, balance).plan(0)))
        for balance in ("dual_constraint", "planned")
    ]
    assert sizes == [[1, 10, 10, 10], [7, 8, 8, 8]]


def test_no_rank_is_favoured() -> None:
    plan = BucketPlanner(mixed(20_000), BUDGET, dp_size=4, micro_batches=2, step_time=WAN_14B).plan(0)
    of_rank = plan.cost[plan.grid].sum(axis=(0, 2))
    assert of_rank.std() / of_rank.mean() < 0.002
    assert [np.argmax(step) for step in plan.cost[plan.grid].sum(axis=2)].count(0) / plan.steps < 0.4


def test_samples_are_shuffled_within_windows_of_shards() -> None:
    table = table_of([0] * 1000, shards=20)
    planner = BucketPlanner(table, BucketBudget(100, 1e9), shard_window=4)
    streams = [planner.stream(epoch) for epoch in (0, 1)]
    for stream in streams:
        assert sorted(stream) == list(range(1000))
        windows = [set(table.shard[part]) for part in stream.reshape(5, 200)]
        assert [len(window) for window in windows] == [4] * 5
    assert set(table.shard[streams[0][:200]]) != set(table.shard[streams[1][:200]])


def test_datasets_are_mixed_by_weight_and_each_is_walked_through_at_its_own_pace() -> None:
    table = table_of([0] * 300)
    table = replace(table, source=np.r_[np.zeros(200), np.ones(100)].astype(np.int32))
    planner = BucketPlanner(table, BucketBudget(100, 1e9), source_weights=(0.25, 0.75))
    streams = [planner.stream(epoch) for epoch in range(4)]
    assert [np.bincount(table.source[stream]).tolist() for stream in streams] == [[75, 225]] * 4
    drawn = np.bincount(np.concatenate(streams), minlength=300)
    assert set(drawn[:200]) == {1, 2} and set(drawn[200:]) == {9}, "1.5 passes of one, 9 of the other"
    assert np.bincount(np.concatenate(streams)[:100], minlength=300)[200:].sum() == pytest.approx(75, abs=3)
    assert sorted(planner.plan(0).stream) == trained(planner.plan(0))
    with pytest.raises(ValueError, match="2 datasets"):
        replace(planner, source_weights=(1.0,)).plan(0)
    with pytest.raises(ValueError, match="source_weights draw samples at random"):
        replace(planner, shuffle=False)


def test_a_dataset_of_less_than_one_draw_in_an_epoch_is_drawn_over_several() -> None:
    table = table_of([0] * 120)
    table = replace(table, source=np.r_[np.zeros(100), np.ones(20)].astype(np.int32))
    planner = BucketPlanner(table, BucketBudget(100, 1e9), source_weights=(299, 1))
    counts = [np.bincount(table.source[planner.stream(epoch)], minlength=2).tolist() for epoch in range(50)]
    assert {sum(each) for each in counts} == {120} and {few for _, few in counts} == {0, 1}
    drawn = np.concatenate([planner.stream(epoch) for epoch in range(50)])
    assert sorted(drawn[drawn >= 100]) == list(range(100, 120)), "0.4 an epoch, each once before any comes again"
    assert len(set(drawn[drawn < 100])) == 100


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(1e-4, 1.0)), min_size=1, max_size=12), st.integers(1, 60))
def test_draws_follow_the_weights_however_small(datasets: list[tuple[int, float]], epochs: int) -> None:
    sizes, weights = (np.array(each) for each in zip(*datasets, strict=True))
    before = np.array([draws_before(sizes, weights.tolist(), epoch) for epoch in range(epochs + 1)])
    assert (np.diff(before, axis=0) >= 0).all() and (before.sum(axis=1) == sizes.sum() * np.arange(epochs + 1)).all()
    exact = np.outer(before.sum(axis=1), weights / weights.sum())
    assert np.abs(before - exact).max() <= max(1, len(sizes) / 2)


def test_a_planner_of_nonsense_is_refused() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"min_diversity={share}"):
            BucketPlanner(table_of([0]), BucketBudget(1, 1), min_diversity=share)
    with pytest.raises(ValueError, match=r"micro_batches=0 .* at least 1"):
        BucketPlanner(table_of([0]), BucketBudget(1, 1), micro_batches=0)
    for wait in (0.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_wait={wait}"):
            BucketPlanner(table_of([0]), BucketBudget(1, 1), max_wait=wait)
    with pytest.raises(ValueError, match=r"balance='best'"):
        BucketPlanner(table_of([0]), BucketBudget(1, 1), balance="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("draws", [10, 50])
def test_what_is_done_of_another_epoch_is_refused(draws: int) -> None:
    planner = BucketPlanner(table_of([0] * 42), BUDGET)
    with pytest.raises(ValueError, match=rf"{draws} draws.* 42"):
        planner.plan(0, done=np.zeros(draws, bool))


@pytest.mark.parametrize("weight", [math.nan, math.inf, 0.0])
def test_weights_that_are_no_numbers_are_refused(weight: float) -> None:
    for weights in ((weight, 1.0), (1.0, weight)):
        with pytest.raises(ValueError, match="2 datasets"):
            draws_before(np.array([100, 20]), weights, 1)


def test_weights_may_be_an_array() -> None:
    sources = np.array([0, 1] * 20, np.int32)
    planner = BucketPlanner(replace(table_of([0] * 40), source=sources), BUDGET, source_weights=(1.0, 3.0))
    same = replace(planner, source_weights=np.array([1.0, 3.0]))  # type: ignore[arg-type]
    assert same.plan(0).digest == planner.plan(0).digest


def test_samples_may_wait_without_end() -> None:
    planner = BucketPlanner(table_of([0] * 400 + [3] * 20), BucketBudget(20, 1e9), dp_size=2, max_wait=math.inf)
    assert trained(planner.plan(0)) == list(range(420))


@pytest.mark.parametrize("k", [1, 3])
def test_on_few_ranks_samples_wait_until_small_micro_batches_cost_little(k: int) -> None:
    """One rank has one micro-batch a step: in 120 of them many shapes have no second one."""
    launch_bound = replace(WAN_14B, floor=float(WAN_14B.predict(1, 20_000)))
    planner = BucketPlanner(mixed(20_000), BUDGET, dp_size=1, micro_batches=k, step_time=launch_bound)
    waiting, soon = planner.plan(0), replace(planner, max_wait=120.0).plan(0)
    full = replace(planner, balance="dual_constraint").plan(0)
    assert waiting.cost.sum() <= 1.005 * full.cost.sum() < soon.cost.sum()
    assert trained(waiting) == trained(full) == list(range(20_000))


def test_where_it_costs_little_samples_wait_120_steps() -> None:
    planner = BucketPlanner(mixed(20_000), BUDGET, dp_size=16, step_time=WAN_14B)
    assert planner.plan(0).digest == replace(planner, max_wait=120.0).plan(0).digest


@pytest.mark.parametrize("step_time", [WAN_14B, None])
def test_on_few_ranks_samples_wait_where_costs_are_of_work_alone(step_time: StepTimeModel | None) -> None:
    """FLOPs are as many however they are divided, but each step has its optimizer and its reduction."""
    planner = BucketPlanner(mixed(20_000), BUDGET, dp_size=1, step_time=step_time)
    full = replace(planner, balance="dual_constraint").plan(0)
    assert full.steps <= planner.plan(0).steps <= 1.1 * full.steps < replace(planner, max_wait=120.0).plan(0).steps


def test_counts_are_whole_numbers_of_any_type() -> None:
    planner = BucketPlanner(table_of([0, 1, 2] * 40), BUDGET, dp_size=2, micro_batches=3)
    same = replace(planner, dp_size=np.int64(2), micro_batches=3.0, shard_window=64.0)  # type: ignore[arg-type]
    assert same.plan(0).digest == planner.plan(0).digest


@pytest.mark.parametrize("balance", ["planned", "dual_constraint", "equal_token"])
def test_nothing_is_left_of_an_epoch(balance: Balance) -> None:
    plan = BucketPlanner(table_of([0] * 40 + [3] * 2), BUDGET, balance, dp_size=2).plan(0, done=np.ones(42, bool))
    assert plan.steps == 0 and not list(plan.micro_batches_of(1))
