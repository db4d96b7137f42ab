"""How equal data-parallel ranks are by the planner's own simulation, with costs that were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_videoscale.cost import BucketBudget, StepTimeModel
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import Balance, BucketPlanner, SampleTable
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, standard_mix

LONGEST = 75_600
KEPT = ("cv_step", "compute_cv", "cost_cv", "efficiency", "slot_time", "diversity", "steps", "tokens_per_cost")


def table_of(clips: Clips, samples: int, seed: int = 0) -> SampleTable:
    """Draws of the standard mix."""
    return SampleTable.of_clips(standard_mix(clips, samples, seed), STANDARD_POLICY, GEOMETRIES["wan2.1"], seed)


def simulate(
    table: SampleTable, step_time: StepTimeModel, ranks: int, micro_batches: int, balance: Balance
) -> dict[str, Any]:
    """Plans one epoch and returns its figures: means over the steps, as fractions."""
    p = step_time.power_law.p
    budget = BucketBudget(2 * LONGEST, LONGEST**p, p)
    planner = BucketPlanner(table, budget, "planned", ranks, micro_batches, step_time, seed=0)
    found = PlanFigures.of(replace(planner, balance=balance).plan(epoch=0)).to_dict()
    setting = {"ranks": ranks, "micro_batches": micro_batches, "balance": balance}
    return setting | {name: round(found[name], 4) for name in KEPT}
