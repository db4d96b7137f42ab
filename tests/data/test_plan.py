"""The plan's promises, over random shapes, budgets, ranks and micro-batches."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import BucketPlanner, EpochPlan, MicroBatch
from lightning_videoscale.data.plan import sequence_length

Shape = tuple[int, int, int]
SHAPES: list[Shape] = [(1, 4, 4), (1, 8, 8), (3, 8, 8), (5, 8, 8), (9, 16, 16)]

planners = st.builds(
    BucketPlanner,
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=120),
    budget=st.builds(BucketBudget, st.floats(1, 1000), st.floats(1, 1e6), st.floats(1, 2.4)),
    dp_size=st.integers(1, 6),
    micro_batches=st.integers(1, 5),
    loss_weighting=st.sampled_from(["sample", "none"]),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)


def _micro_batches(plan: EpochPlan) -> list[MicroBatch]:
    return [micro_batch for step in plan.steps for rank in step for micro_batch in rank]


@given(planners, st.integers(0, 3))
def test_every_sample_is_trained_on_exactly_once(planner: BucketPlanner, epoch: int) -> None:
    counted = [m for m in _micro_batches(planner.plan(epoch)) if m.meta.loss_weight != 0]
    assert sorted(sample for m in counted for sample in m.samples) == list(range(len(planner.shapes)))


@given(planners)
def test_all_ranks_have_equally_many_whole_steps_in_every_epoch(planner: BucketPlanner) -> None:
    slots = planner.dp_size * planner.micro_batches
    plans = [planner.plan(epoch) for epoch in range(3)]
    assert len({len(plan.steps) for plan in plans}) == 1
    for plan in plans:
        lengths = {len(plan.micro_batches_of(rank)) for rank in range(planner.dp_size)}
        assert lengths == {len(plan.steps) * planner.micro_batches}
    # No more steps than the slots ask for.
    sizes = {s: planner.budget.batch_size(sequence_length(s, planner.patch_size)) for s in SHAPES}
    batches = sum(-(-n // sizes[shape]) for shape, n in Counter(planner.shapes).items())
    assert len(plans[0].steps) == -(-batches // slots)


@given(planners, st.integers(0, 3))
def test_micro_batches_are_of_one_shape_and_within_the_budget(planner: BucketPlanner, epoch: int) -> None:
    for micro_batch in _micro_batches(planner.plan(epoch)):
        meta = micro_batch.meta
        assert {planner.shapes[sample] for sample in micro_batch.samples} == {(meta.frames, meta.height, meta.width)}
        assert meta.sequence_length == meta.frames * meta.height * meta.width // 4
        assert meta.samples == len(micro_batch.samples) <= planner.budget.batch_size(meta.sequence_length)
        assert meta.predicted_cost == planner.budget.cost(meta.samples, meta.sequence_length)


@given(planners, st.integers(0, 3))
def test_the_mean_over_ranks_and_micro_batches_is_the_mean_over_samples(planner: BucketPlanner, epoch: int) -> None:
    losses = np.random.default_rng(0).normal(size=len(planner.shapes))
    slots = planner.dp_size * planner.micro_batches
    for step in planner.plan(epoch).steps:
        micro_batches = [m for rank in step for m in rank]
        counted = [sample for m in micro_batches if m.meta.loss_weight for sample in m.samples]
        assert counted, "no step is made of fillers alone"
        weighted = sum(m.meta.loss_weight * losses[list(m.samples)].mean() for m in micro_batches) / slots
        if planner.loss_weighting == "sample":
            assert weighted == pytest.approx(losses[counted].mean(), abs=1e-12)
        else:
            assert {m.meta.loss_weight for m in micro_batches} <= {0.0, 1.0}


@given(planners)
def test_weights_other_than_one_are_announced(planner: BucketPlanner) -> None:
    weights = {m.meta.loss_weight for epoch in range(4) for m in _micro_batches(planner.plan(epoch))}
    if weights != {1.0}:
        assert planner.needs_loss_weights()


def test_uniform_batches_need_no_weights() -> None:
    planner = BucketPlanner([SHAPES[0]] * 16, BucketBudget(8, 1e9), dp_size=2, micro_batches=2)
    assert not planner.needs_loss_weights()
    assert not BucketPlanner([*SHAPES, SHAPES[0]], BucketBudget(8, 1e9)).needs_loss_weights(), "one rank, one batch"
    assert replace(planner, dp_size=3).needs_loss_weights()


@given(planners)
def test_plans_are_pure_and_epochs_differ(planner: BucketPlanner) -> None:
    assert planner.plan(1).digest() == replace(planner).plan(1).digest()
    if planner.shuffle and len(planner.shapes) > 20:
        assert planner.plan(0).digest() != planner.plan(1).digest()
        assert planner.plan(0).digest() != replace(planner, seed=planner.seed ^ 1).plan(0).digest()
    if not planner.shuffle:
        assert planner.plan(0) == planner.plan(7)


def test_the_stream_of_random_numbers_does_not_change() -> None:
    plan = BucketPlanner([SHAPES[0]] * 8, BucketBudget(1, 1), seed=5).plan(epoch=3)
    # Written down once: an upgrade of numpy must not change what a resumed run trains on.
    assert [m.samples[0] for m in plan.micro_batches_of(0)] == [4, 3, 1, 2, 0, 5, 6, 7]


def test_batches_are_halved_before_a_sample_is_repeated() -> None:
    # Five batches of four for two ranks: one is halved, nothing is repeated.
    plan = BucketPlanner([SHAPES[0]] * 20, BucketBudget(16, 1e9), dp_size=2).plan(0)
    sizes = Counter(m.meta.samples for m in _micro_batches(plan))
    assert sizes == {4: 4, 2: 2}
    # Three single samples for two ranks: the cheapest is repeated, with weight 0.
    plan = BucketPlanner([SHAPES[2], SHAPES[0], SHAPES[2]], BucketBudget(1, 1), dp_size=2).plan(0)
    fillers = [m for m in _micro_batches(plan) if m.meta.loss_weight == 0]
    assert [m.samples for m in fillers] == [(1,)]


def test_costs_of_the_ranks_are_close_and_no_rank_is_favoured() -> None:
    shapes = [SHAPES[i] for i in np.random.default_rng(0).integers(0, 4, 4000)]
    planner = BucketPlanner(shapes, BucketBudget(160, 2 * 80**2), dp_size=4, micro_batches=4)
    plan = planner.plan(0)
    costs = np.array([[sum(m.meta.predicted_cost for m in rank) for rank in step] for step in plan.steps])
    drawn = np.random.default_rng(1).permutation([m.meta.predicted_cost for m in _micro_batches(plan)])
    spread, drawn_spread = (np.mean(c.std(axis=1) / c.mean(axis=1)) for c in (costs, drawn.reshape(-1, 4, 4).sum(2)))
    assert drawn_spread > 0.15
    assert spread < 0.06
    assert costs.mean(axis=0).std() / costs.mean() < 0.01


def test_a_shape_that_is_no_multiple_of_the_patch_is_an_error() -> None:
    assert sequence_length((5, 8, 6), (1, 2, 2)) == 60
    with pytest.raises(ValueError, match=r"\(5, 8, 7\) cannot be cut into patches of \(1, 2, 2\)"):
        sequence_length((5, 8, 7), (1, 2, 2))
    with pytest.raises(ValueError, match=r"micro_batches=0 and dp_size=1"):
        BucketPlanner(SHAPES, BucketBudget(1, 1), micro_batches=0)


def test_ten_thousand_samples_are_planned_in_a_moment() -> None:
    shapes = [SHAPES[i] for i in np.random.default_rng(0).integers(0, len(SHAPES), 10_000)]
    started = time.perf_counter()
    BucketPlanner(shapes, BucketBudget(600, 600**2), dp_size=16, micro_batches=4).plan(0)
    assert time.perf_counter() - started < 2.0
