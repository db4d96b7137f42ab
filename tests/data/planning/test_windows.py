"""Epochs in windows: the same stream and shapes as of the whole epoch, every draw once, and little of it in memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.planning import BucketPlanner, MicroBatch, SampleTable
from lightning_videoscale.data.planning.compute_budget import try_budgets
from lightning_videoscale.data.planning.diversity import diversity
from lightning_videoscale.data.planning.figures import PlanFigures, delays
from lightning_videoscale.data.planning.sample_weights import weights_and_samples
from lightning_videoscale.data.planning.shapes import Clips, Media, ShapePolicy, TablePart
from lightning_videoscale.data.planning.stream import epoch_stream
from lightning_videoscale.data.planning.windows import EpochWindows, Window

GEOMETRY = GEOMETRIES["wan2.1"]
POLICY = ShapePolicy(areas=(64 * 64, 128 * 128), fps=8, max_frames=17, crop_share=0.5, crop_min_frames=5)
BUDGET = BucketBudget(160, 160.0**2, 2.0)


class Shards:
    """Random clips in shards of random sizes, some of them too small; keeps how many were asked for at a time."""

    def __init__(self, sizes: list[int], seed: int = 0, latents: bool = False, datasets: int = 1) -> None:
        draw, n = np.random.default_rng(seed), sum(sizes)
        media = np.where(draw.random(n) < 0.3, Media.IMAGE, Media.VIDEO)
        side = draw.choice([8, 32, 64, 96, 200], (2, n), p=[0.05, 0.25, 0.3, 0.2, 0.2])
        if latents:
            media, side = np.full(n, Media.LATENTS), draw.choice([4, 8, 16], (2, n))
        frames = np.where(media == Media.IMAGE, 1, draw.integers(0, 40, n))
        self.ends = np.cumsum(sizes)
        self.source = np.arange(len(sizes), dtype=np.int32) % datasets
        self.shard = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self.clips = Clips(
            width=side[0], height=side[1], num_frames=frames, fps=np.full(n, 8.0), duration=frames / 8,
            media=media.astype(np.uint8), caption_length=np.zeros(n, np.int32), source=self.source[self.shard],
        )  # fmt: skip
        self.most = 0

    def clips_at(self, rows: NDArray[np.int64]) -> Clips:
        assert (np.diff(rows) > 0).all()
        self.most = max(self.most, len(rows))
        return self.clips.take(rows)

    def windows(self, size: int, **settings: Any) -> EpochWindows:
        return EpochWindows(size, self, self.ends, self.source, POLICY, GEOMETRY, **settings)

    def table(self, epoch: int, seed: int = 0) -> SampleTable:
        return SampleTable.of_clips(self.clips, POLICY, GEOMETRY, seed, self.shard, epoch)

    def planner(self, size: int | None, **settings: Any) -> BucketPlanner:
        """Plans the clips in windows, or without them."""
        shuffle = {name: settings[name] for name in ("seed", "shard_window") if name in settings}
        if size is None:
            return BucketPlanner(self.table(0, settings.get("seed", 0)), BUDGET, redraw=self.table, **settings)
        windows = self.windows(size, **shuffle)
        return BucketPlanner(windows.sample, BUDGET, windows=windows, **settings)


CLIPS = Shards([11] * 18)


def places(planner: BucketPlanner, epoch: int = 0) -> list[Progress]:
    """The windows of an epoch."""
    found = [Progress.start(planner, epoch)]
    while not found[-1].plan.ends_epoch:
        found.append(found[-1].next_window(planner))
    return found


def trained(place: Progress, first: int = 0, last: int | None = None) -> list[MicroBatch]:
    """What all ranks train on in a plan, step by step, fillers left out."""
    k = place.micro_batches
    ranks = [[*place.plan.micro_batches_of(rank)] for rank in range(place.plan.grid.shape[1])]
    last = place.plan.steps if last is None else last
    slots = [m for step in range(first, last) for rank in ranks for m in rank[step * k : (step + 1) * k]]
    return [m for m in slots if m.meta.loss_weight]


sizes = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda each: sum(each) > 3)


@settings(max_examples=40)
@given(
    sizes, st.integers(0, 3), st.integers(1, 4), st.sampled_from([None, (1.0,), (3.0, 1.0), (0.2, 0.5, 0.3)]), st.data()
)
def test_any_draws_are_those_of_the_whole_epoch(
    sizes: list[int], epoch: int, shard_window: int, weights: tuple[float, ...] | None, data: st.DataObject
) -> None:
    shards = Shards(sizes, seed=1, datasets=len(weights or [0]))
    table = shards.table(epoch)
    counts = np.bincount(table.source[table.shape_id >= 0], minlength=len(weights or [0]))
    if not counts.all():
        return
    whole = epoch_stream(table, epoch, 7, shard_window, weights)
    windows = shards.windows(5, seed=7, shard_window=shard_window, weights=weights)
    draws = np.array(sorted(data.draw(st.sets(st.integers(0, len(whole) - 1), max_size=20))), np.int64)
    first = data.draw(st.integers(0, len(whole)))
    window = Window(first, data.draw(st.integers(first, len(whole))), len(whole), draws[draws < first])
    table, stream = windows.content(epoch, window)
    assert table.rows is not None
    assert table.rows[stream].tolist() == whole[window.draws].tolist()
    assert windows.first().total == len(whole)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 199), min_size=1), st.integers(0, 2))
def test_clips_have_the_shapes_that_they_have_in_the_whole_epoch(rows: set[int], epoch: int) -> None:
    shards, at = Shards([200]), np.array(sorted(rows))
    whole = shards.table(epoch)
    part = SampleTable.of_clips(shards.clips_at(at), POLICY, GEOMETRY, epoch=epoch, part=TablePart(at, 200))
    known = [whole.shapes[i] if i >= 0 else None for i in whole.shape_id[at]]
    assert [part.shapes[i] if i >= 0 else None for i in part.shape_id] == known
    assert part.start.tolist() == whole.start[at].tolist()
    usable = POLICY.is_usable(shards.clips, GEOMETRY)
    assert usable.tolist() == (whole.shape_id >= 0).tolist() and 0 < usable.sum() < 200


@pytest.mark.parametrize("balance", ["planned", "dual_constraint", "equal_token"])
@pytest.mark.parametrize("loss_normalization", ["step", "epoch"])
def test_a_window_that_covers_everything_is_planned_as_the_whole_epoch(balance: Any, loss_normalization: Any) -> None:
    shards = Shards([20] * 20)
    settings = {"balance": balance, "loss_normalization": loss_normalization, "dp_size": 2, "shard_window": 3}
    for epoch in (0, 2):
        whole, [window] = shards.planner(None, **settings).plan(epoch), places(shards.planner(400, **settings), epoch)
        for rank in (0, 1):
            assert [*window.plan.micro_batches_of(rank)] == [*whole.micro_batches_of(rank)]
        state = window.state_dict(4)
        assert "window" not in state and state["version"] == 2, "what earlier releases read"


@settings(max_examples=40)
@given(
    sizes,
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["planned", "dual_constraint", "equal_token"]),
    st.sampled_from([1.5, 120.0]),
)
def test_every_sample_once_in_whole_steps(
    sizes: list[int], size: int, dp_size: int, micro_batches: int, balance: Any, max_wait: float
) -> None:
    shards = Shards(sizes)
    chosen = {"dp_size": dp_size, "micro_batches": micro_batches, "balance": balance, "max_wait": max_wait}
    if not (usable := np.flatnonzero(shards.table(1).shape_id >= 0)).size:
        return
    found = places(shards.planner(size, **chosen), epoch=1)
    seen = [sample for place in found for m in trained(place) for sample in m.samples]
    assert sorted(seen) == usable.tolist()
    assert not any(place.plan.filler.any() for place in found[:-1]), "nothing is padded but at the epoch's end"
    assert all(before.end == after.counted for before, after in itertools.pairwise(found))
    assert len(found[-1]) == found[-1].end and all(len(place) > place.end for place in found[:-1])
    for place in found:
        totals = place.plan.weight.sum(axis=(1, 2))
        assert totals == pytest.approx(np.full(place.plan.steps, dp_size * micro_batches))


def test_what_is_left_over_comes_in_the_next_window() -> None:
    planner = Shards([30] * 20).planner(100, dp_size=7)
    found = places(planner)
    assert len(found) > 4
    for before, after in itertools.pairwise(found):
        left, window = before.plan.left_over, after.plan.window
        assert window is not None and before.plan.window is not None
        assert window.carried.tolist() == before.plan.window.draws[left].tolist()
        trained_now = np.setdiff1d(np.arange(len(after.plan.stream)), after.plan.left_over)
        assert set(range(len(window.carried))) <= set(trained_now.tolist()), "nothing waits for two windows"
    assert any(len(place.plan.left_over) for place in found)


def test_the_length_is_estimated_well_from_the_first_window_on() -> None:
    for balance in ("planned", "dual_constraint"):
        found = places(Shards([50] * 100).planner(500, dp_size=2, balance=balance))
        true = len(found[-1])
        assert [len(place) for place in found] == pytest.approx([true] * len(found), rel=0.06)


def test_a_gradient_over_the_epoch_counts_every_sample_alike() -> None:
    planner = Shards([50] * 40).planner(300, dp_size=2, loss_normalization="epoch")
    weights = {m.meta.loss_weight / m.meta.samples for place in places(planner) for m in trained(place)}
    assert max(weights) == pytest.approx(min(weights))


@pytest.mark.parametrize(("size", "k", "near"), [(700, 4, 0.01), (300, 4, 0.1), (50, 4, 0.3), (20, 16, 1.0)])
def test_gradients_of_an_epoch_are_as_large_as_without_windows(size: int, k: int, near: float) -> None:
    """However few steps a window has, or if several windows make one: the first then tells roughly what is in it."""
    planner = Shards([50] * 40).planner(size, dp_size=8, micro_batches=k, loss_normalization="epoch")
    weights = np.concatenate([place.plan.weight.ravel() for place in places(planner)])
    assert weights.mean() == pytest.approx(1, abs=near)


def test_of_the_clips_no_more_is_read_at_a_time_than_a_window_needs() -> None:
    shards = Shards([10] * 400)
    planner = shards.planner(120, dp_size=2, shard_window=4)
    shards.most = 0  # all were counted, which reads them in blocks
    found = places(planner)
    most = max(len(place.plan.stream) for place in found)
    assert len(found) > 25 and most < 150 and shards.most == most
    assert max(place.plan.digest for place in found) and len({place.plan.digest for place in found}) == len(found)


def test_a_sampler_forgets_nothing_that_may_still_come() -> None:
    sampler = PlannedSampler(CLIPS.planner(60, dp_size=2), 0, on_begin=lambda progress: None)
    assert len([*sampler]) == len(sampler)
    first, second, *_ = expected = places(sampler.planner)
    assert len(expected) > 3
    for place in (second, first, second):  # to go back is nothing that a training does
        assert sampler.reach(place.counted).plan.window == second.plan.window
    assert sampler.state_dict(second.counted)["plan"] == second.plan.digest


@pytest.mark.parametrize("size", [None, 50])
def test_a_run_goes_on_with_as_many_clips_as_its_epoch_was_begun_with(size: int | None) -> None:
    """Of another geometry more clips may be smaller than a patch: the places of those that are done say nothing."""
    begun = Progress.start(Shards([11] * 18).planner(50), 0)
    others = Shards([11] * 18)
    others.clips.width[:40] = 8
    draws = int(POLICY.is_usable(others.clips, GEOMETRY).sum())
    with pytest.raises(ValueError, match=rf"{begun.plan.window.total} draws.* {draws}"):  # type: ignore[union-attr]
        Progress.resume(others.planner(size), begun.state_dict(2))


def test_latents_that_cannot_be_cut_are_refused_before_the_first_window() -> None:
    shards = Shards([10] * 20, latents=True)
    shards.clips.width[150] = 5
    with pytest.raises(ValueError, match=r"\(1, 2, 2\)"):
        shards.planner(20).plan(0)


@pytest.mark.parametrize("weights", [None, (0.2, 0.8)])
def test_the_sample_is_the_first_window_and_the_longest_clip(weights: tuple[float, ...] | None) -> None:
    shards = Shards([40] * 30, datasets=len(weights or [0]))
    table = shards.table(0)
    longest = table.sequence_lengths.max()
    for seed in range(5):
        windows = shards.windows(30, seed=seed, weights=weights)
        rows = windows.content(0, windows.first()).table.rows
        sample = windows.sample
        assert rows is not None and sample.rows is not None and len(np.setdiff1d(sample.rows, rows)) <= 1
        assert set(rows.tolist()) <= set(sample.rows.tolist())
        assert sample.sequence_lengths.max() == shards.table(0, seed).sequence_lengths.max() == longest


@pytest.mark.parametrize("k", [1, 3])
def test_figures_of_windows_are_those_of_all_steps(k: int) -> None:
    planner = Shards([50] * 40).planner(700, dp_size=4, micro_batches=k)
    plans = [*planner.plans(1)]
    assert [p.digest for p in plans] == [place.plan.digest for place in places(planner, 1)] and len(plans) == 3
    found, each = PlanFigures.of(*plans), [PlanFigures.of(plan) for plan in plans]
    steps = [figures.steps for figures in each]
    assert found.steps == sum(steps) and found.samples == sum(figures.samples for figures in each)
    for name in ("cv_step", "compute_cv", "cost_cv"):
        assert getattr(found, name) == pytest.approx(np.average([getattr(f, name) for f in each], weights=steps))
    slowest = np.concatenate([p.cost[p.grid].sum(axis=2).max(axis=1) for p in plans]).sum()
    tokens = [m.meta.sequence_length * m.meta.samples for place in places(planner, 1) for m in trained(place)]
    assert found.tokens_per_cost == pytest.approx(sum(tokens) / slowest)
    weights, counts = Counter[Any](), Counter[Any]()
    for plan in plans:
        for shape, weight, number in zip(plan.table.shapes, *weights_and_samples(plan), strict=True):
            weights[shape], counts[shape] = weights[shape] + weight, counts[shape] + number
    relative = [weights[s] / counts[s] / weights.total() * counts.total() for s in weights if counts[s]]
    assert (found.least_weight, found.most_weight) == pytest.approx((min(relative), max(relative)))
    late = np.concatenate([delays(plan) for plan in plans])
    assert found.delay_p99 == pytest.approx(np.quantile(late, 0.99))
    shapes = [p.table.shapes[s] for p in plans for s in p.shape_id[p.grid].ravel()]
    number = {shape: i for i, shape in enumerate(sorted(set(shapes)))}
    assert found.diversity == pytest.approx(diversity(np.array([number[s] for s in shapes]).reshape(-1, 4 * k)))


def test_what_is_carried_is_late_by_what_it_has_waited() -> None:
    for plan in Shards([30] * 20).planner(100, dp_size=7, balance="dual_constraint").plans(0):
        assert plan.window is not None
        late = delays(plan)
        carried = plan.members[np.repeat(~plan.filler, np.diff(plan.starts))] < len(plan.window.carried)
        assert (late[carried] > 0).all() and late[~carried].min(initial=0) > -plan.steps


def test_compute_budgets_are_tried_on_the_first_window() -> None:
    planner = CLIPS.planner(60, dp_size=2)
    tried = try_budgets(planner)
    assert tried[0].budget == BUDGET and tried[0].figures.samples == len(planner.table) < 70


planners = st.builds(
    dict,
    dp_size=st.integers(1, 6),
    micro_batches=st.integers(1, 3),
    balance=st.sampled_from(["planned", "dual_constraint", "equal_token"]),
    size=st.sampled_from([None, 20, 45, 500]),
)


@settings(max_examples=50)
@given(st.lists(st.tuples(planners, st.floats(0, 1), st.floats(10, 1000)), min_size=1, max_size=8))
def test_every_sample_once_however_often_a_run_stops_and_whatever_changes(legs: list[Any]) -> None:
    counts: Counter[int] = Counter()
    state = None
    for chosen, share, budget in [*legs, ({"size": 30, "dp_size": 2}, 1.0, 100.0)]:
        planner = replace(CLIPS.planner(**chosen), budget=BucketBudget(budget, budget**2, 2.0))
        progress = Progress.start(planner, 0) if state is None else Progress.resume(planner, state)
        if progress.epoch > 0:
            break
        assert progress.done % progress.micro_batches == 0, "the Trainer's steps begin where the plan's do"
        stop = progress.done + round(share * (len(progress) - progress.done))
        while not progress.plan.ends_epoch and (progress.end < stop or share == 1):
            counts.update(s for m in trained(progress, progress.steps) for s in m.samples)
            progress = progress.next_window(planner)
        stop = progress.end if share == 1 else min(stop, progress.end)
        steps = (stop - progress.counted) // progress.micro_batches
        counts.update(s for m in trained(progress, progress.steps, steps) for s in m.samples)
        state = progress.state_dict(stop)
    else:
        assert state is not None and state["is_over"]
    assert sorted(counts.elements()) == np.flatnonzero(CLIPS.table(0).shape_id >= 0).tolist()


def test_a_run_goes_on_in_the_middle_of_a_window_with_the_same_plan() -> None:
    planner = CLIPS.planner(60, dp_size=2, micro_batches=2)
    place = places(planner, epoch=1)[1]
    state = place.state_dict(place.counted + 3)
    again = Progress.resume(planner, state)
    assert again.plan.digest == place.plan.digest and (again.steps, again.done) == (1, place.counted + 2)
    assert again.plan.window is not None and again.plan.window.first == place.plan.window.first > 0  # type: ignore[union-attr]
    others = Progress.resume(replace(planner, dp_size=3), state)
    undone = [s for m in trained(place, first=1) for s in m.samples]
    carried = place.plan.table.numbers(place.plan.stream[place.plan.left_over]).tolist()
    now = others.plan.table.numbers(others.plan.stream[others.plan.left_over]).tolist()
    assert sorted([s for m in trained(others) for s in m.samples] + now) == sorted(undone + carried)
