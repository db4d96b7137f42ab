"""Bands of micro-batches: none too small, cut where ranks wait least, and what is predicted of the waits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.data.planning.bands import BandCuts
from lightning_videoscale.data.planning.figures import PlanFigures
from tests.data.planning.tables import BUDGET, WAN_14B, mixed


def falling(seed: int, count: int, kinds: int) -> NDArray[np.float64]:
    """Costs of micro-batches of so many shapes, the costliest first."""
    drawn = np.random.default_rng(seed)
    return -np.sort(-np.exp(drawn.normal(size=kinds))[drawn.integers(0, kinds, count)])


def waits_of_draws(cost: NDArray[np.float64], cuts: NDArray[np.int64], ranks: int) -> float:
    """What ranks wait for each other where the rows of a band are drawn from it, over the time that they work."""
    drawn = np.random.default_rng(0)
    waits = 0.0
    for begin, end in itertools.pairwise(cuts * ranks):
        rows = np.stack([drawn.permutation(cost[begin:end]) for _ in range(20)]).reshape(-1, ranks)
        waits += (rows.max(axis=1, keepdims=True) - rows).sum() / 20
    return waits / float(cost.sum())


@given(
    st.integers(0, 1000), st.integers(1, 400), st.integers(1, 40), st.integers(1, 30), st.floats(0.004, 14),
    st.floats(0.1, 300),
)  # fmt: skip
def test_every_micro_batch_is_in_one_band_of_enough(
    seed: int, rows: int, kinds: int, ranks: int, width: float, least: float
) -> None:
    bands = BandCuts(falling(seed, rows * ranks, kinds), ranks, least)
    wide, narrow = bands.best(4 * width), bands.best(width)
    for cuts in (wide, narrow, *bands.between(wide, narrow)):
        sizes = np.diff(cuts) * ranks
        assert cuts[0] == 0 and cuts[-1] == rows
        assert len(sizes) == 1 or sizes.min() >= least
        assert np.isfinite(bands.waits(cuts))


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(2, 9), st.integers(1, 6))
def test_no_other_cuts_make_ranks_wait_less(seed: int, rows: int, kinds: int, ranks: int) -> None:
    bands = BandCuts(falling(seed, rows * ranks, kinds), ranks, 1)
    others = [
        np.array([0, *inner, rows]) for count in range(rows) for inner in itertools.combinations(range(1, rows), count)
    ]
    for width in (1.0, 1.5):  # of any width: each costs a penalty
        least = min(bands.waits(cuts) + (len(cuts) - 1) * (width / 4) ** 2 for cuts in others)
        found = bands.best(width)
        assert bands.waits(found) + (len(found) - 1) * (width / 4) ** 2 == pytest.approx(least, abs=1e-12)


def test_unlike_costs_are_divided_where_they_part() -> None:
    cost = np.r_[np.full(300, 1.0), np.full(100, 0.9), np.full(200, 0.4)]
    bands = BandCuts(cost, 4, 8)
    assert bands.best(0.2).tolist() == [0, 75, 100, 150] and bands.waits(bands.best(0.2)) < 1e-12
    assert bands.best(0.7).tolist() == [0, 100, 150], "a tenth apart, in a sixth of the time, is not worth a band"
    assert bands.best(8).tolist() == [0, 150]


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_waits_are_predicted_as_draws_have_them(ranks: int) -> None:
    cost = falling(3, 96 * 1024, 90)
    bands = BandCuts(cost, ranks, 2048)
    for width in (0.05, 0.2, 0.6):
        cuts = bands.best(width)
        assert bands.waits(cuts) == pytest.approx(waits_of_draws(cost, cuts, ranks), rel=0.1)


def test_one_rank_waits_for_nobody() -> None:
    planner = BucketPlanner(mixed(4_000), BUDGET, step_time=WAN_14B)
    assert PlanFigures.of(planner.plan(0)).diversity == pytest.approx(1)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(64, 1), (64, 4), (256, 2)])
def test_many_ranks_wait_little_at_every_micro_batch(ranks: int, micro_batches: int) -> None:
    planner = BucketPlanner(mixed(120_000), BUDGET, "planned", ranks, micro_batches, WAN_14B)
    figures = PlanFigures.of(planner.plan(0))
    others = PlanFigures.of(replace(planner, balance="dual_constraint").plan(0))
    assert figures.at_work(in_slots=True) > 0.92 > 0.9 > others.at_work(in_slots=True)
    assert figures.diversity > 0.5
