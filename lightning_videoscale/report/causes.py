"""What is to blame where ranks wait for each other: a slow rank, wrong predictions, the plan, or nothing of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from lightning_videoscale.cost.points import weighted_median

if TYPE_CHECKING:
    from lightning_videoscale.report.findings import Findings

Cause = Literal["rank", "costs", "chance", "plan"]
"""`rank`: one or some are slow. `costs`: the planner predicts them wrongly. `chance`: the plan is even and its
predictions are right, but times vary. `plan`: it is not even, by its own predictions, or it predicts nothing."""

SLOW = 1.05
"""Slowdown from which a rank may be to blame."""

WRONG = 0.03
"""Error of the planner's predictions from which they may be to blame."""

_MOST = 0.5
"""Share of the waiting that slow ranks must explain."""

_EVEN = 0.25
"""Spread of predicted costs over that of times up to which a plan is even: of two ranks, it then explains half."""


class SlowRank(NamedTuple):
    """A rank that is slow by itself.

    Attributes:
        rank: Its global number.
        slowdown: Its compute time over that of a healthy rank for the same work, the median over the run.
    """

    rank: int
    slowdown: float


def slow_ranks(found: Findings) -> list[SlowRank]:
    """Returns the ranks that are slow over the comparable windows, the slowest first."""
    told = [window for window in found.comparable if window.get("slowdowns")]
    steps = np.array([window["steps"] for window in told])
    by_rank = np.array([window["slowdowns"] for window in told], np.float64).T
    slow = [SlowRank(rank, weighted_median(seen, steps)) for rank, seen in enumerate(by_rank)]
    return sorted((each for each in slow if each.slowdown >= SLOW), key=lambda each: -each.slowdown)


def cause_of(found: Findings) -> Cause:
    """Returns what is to blame for most of what ranks wait."""
    if found.slow_ranks and found.even_idle <= (1 - _MOST) * found.idle:
        return "rank"
    cost_cv, cv_step = found.per_step("cost_cv"), found.per_step("cv_step")
    if not len(cost_cv) or np.median(cost_cv) > _EVEN * np.median(cv_step):
        return "plan"
    return "costs" if found.planner_error is not None and found.planner_error >= WRONG else "chance"
