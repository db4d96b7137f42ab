"""What each of some compute budgets makes of the plan of a sample of the epoch; see `cost.compute_budget`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lightning_videoscale.cost import compute_budget
from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.compute_budget import TriedBudget
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.plan import BucketPlanner
from lightning_videoscale.data.planning.table import SampleTable

_DRAWS = 32_000
_STEPS = 16
"""What is planned: so many draws, or, where many ranks train, so many steps. In one step all shapes meet anyway."""


def try_budgets(planner: BucketPlanner) -> list[TriedBudget[PlanFigures]]:
    """Plans a sample of the first epoch under the planner's M_comp and larger ones, each that makes other batches.

    The same on all ranks whose planners are equal. It takes about a second, or a few on a thousand ranks.

    Args:
        planner: Its budget has the smallest M_comp to try.

    Returns:
        By rising M_comp; the planner's own is the first.
    """
    sampled = replace(planner, table=_sampled(planner), shuffle=False, source_weights=None, redraw=None)

    def batch_sizes(budget: BucketBudget) -> tuple[int, ...]:
        return tuple(replace(sampled, budget=budget).batch_sizes.tolist())

    def plan(budget: BucketBudget) -> PlanFigures:
        return PlanFigures.of(replace(sampled, budget=budget).plan(epoch=0))

    return compute_budget.try_budgets(planner.budget, batch_sizes, plan, planner.min_diversity)


def _sampled(planner: BucketPlanner) -> SampleTable:
    """Draws of the first epoch, evenly apart, in their order."""
    table, stream = planner.table, planner.stream(epoch=0)
    micro_batches = (1 / planner.batch_sizes[table.shape_id[stream]]).sum()
    steps = micro_batches / (planner.dp_size * planner.micro_batches)
    draws = min(max(_DRAWS, math.ceil(_STEPS / steps * len(stream))), len(stream))
    rows = stream[np.arange(draws) * len(stream) // draws]
    return SampleTable.create(table.shapes, table.sequence_lengths, table.shape_id[rows], start=table.start[rows])
