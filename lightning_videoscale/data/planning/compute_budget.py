"""Which compute budget makes the most of a plan.

M_comp says which batch sizes there are, and so which costs micro-batches have. Ranks that train at the same time are to
find micro-batches of one cost, and of different shapes: whether the mix has them depends on where M_comp cuts. Where
one sample of the longest shape is all that M_comp allows, most shapes a little shorter come alone too, at any cost
between half of it and all; a little more room can put them in pairs. No formula tells how much, and planning a sample
of the epoch under each of some budgets does, in a second or two, or a few on a thousand ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.data.planning.diversity import ENOUGH
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.plan import BucketPlanner
from lightning_videoscale.data.planning.table import SampleTable

FACTORS = tuple(percent / 100 for percent in range(100, 205, 5))
"""Compute budgets that are tried, over the smallest. Twice as much doubles a step, in time and in samples."""
EQUAL = 0.005
"""Throughputs that differ by less count as equal: a sample of the epoch tells no better, nor does a fit of costs."""

_AS_DIVERSE = 0.02
"""Diversities that differ by less count as equal where none is asked for: per cents of throughput may lie between."""

_DRAWS = 64_000
_STEPS = 16
"""What is planned: so many draws, or, where many ranks train, so many steps. One step has all shapes anyway."""


class TriedBudget(NamedTuple):
    """A budget and what it makes of the plan of a sample of the epoch.

    Attributes:
        factor: Its M_comp over the smallest.
        budget: The budget.
        figures: Of the plan, by predicted cost.
        is_diverse: Whether the steps have as many different shapes as the planner is to see to, or else as many as
            under the smallest budget; where no diversity is asked for, 2 % of random draws' are no difference.
    """

    factor: float
    budget: BucketBudget
    figures: PlanFigures
    is_diverse: bool


def try_budgets(planner: BucketPlanner) -> list[TriedBudget]:
    """Plans a sample of the first epoch under the planner's M_comp and larger ones, each that makes other batches.

    The same on all ranks whose planners are equal.

    Args:
        planner: Its budget has the smallest M_comp to try.

    Returns:
        By rising M_comp; the planner's own is the first.

    Raises:
        ValueError: If the planner's budget has no M_comp.
    """
    planner = replace(planner, windows=None)  # its table is a sample
    sampled = replace(planner, table=_sampled(planner), shuffle=False, source_weights=None, redraw=None)
    smallest = planner.budget
    if not isinstance(smallest, BucketBudget):
        raise ValueError(f"Budgets are tried by their M_comp, and {type(smallest).__name__} has none.")
    tried: dict[tuple[int, ...], TriedBudget] = {}
    least, less = (ENOUGH, _AS_DIVERSE) if planner.min_diversity is None else (planner.min_diversity, 0.0)
    for factor in FACTORS:
        budget = replace(smallest, m_comp=smallest.m_comp * factor)
        trial = replace(sampled, budget=budget)
        if (sizes := tuple(trial.batch_sizes.tolist())) in tried:
            continue
        figures = PlanFigures.of(trial.plan(epoch=0))
        least = min(least, figures.diversity) if not tried else least
        tried[sizes] = TriedBudget(factor, budget, figures, is_diverse=figures.diversity >= least - less)
    return [*tried.values()]


def best_of(tried: Sequence[TriedBudget], in_slots: bool = False) -> TriedBudget:
    """The smallest budget whose tokens per predicted second are equal to the highest, of those with diverse steps.

    Args:
        tried: By rising M_comp.
        in_slots: Whether ranks wait for each other at every micro-batch, as under FSDP2 and ZeRO-3, or at the end of a
            step, as under DDP.
    """
    throughputs = {each: each.figures.throughput(in_slots) for each in tried if each.is_diverse}
    enough = (1 - EQUAL) * max(throughputs.values())
    return next(each for each, throughput in throughputs.items() if throughput >= enough)


def explain(tried: Sequence[TriedBudget], best: TriedBudget, in_slots: bool, smallest: str) -> str:
    """Why a budget is the best of those that were tried, where words tell what the smallest is."""
    now, before = best.figures, tried[0].figures
    works = f"ranks are predicted to work {now.at_work(in_slots):.1%} of the time"
    if best is tried[0]:
        return (
            f"{smallest}: {works}, and no budget up to {FACTORS[-1]:g} x this one that mixes shapes as well has "
            f"{EQUAL:.1%} more tokens per second"
        )
    return (
        f"{best.factor:g} x {smallest}: {works} instead of {before.at_work(in_slots):.1%}, "
        f"{now.throughput(in_slots) / before.throughput(in_slots) - 1:+.1%} tokens per second, "
        f"{now.samples / now.steps:.0f} samples a step instead of {before.samples / before.steps:.0f}"
    )


def _sampled(planner: BucketPlanner) -> SampleTable:
    """Draws of the first epoch, evenly apart, in their order."""
    table, stream = planner.table, planner.stream(epoch=0)
    micro_batches = (1 / planner.batch_sizes[table.shape_id[stream]]).sum()
    steps = micro_batches / (planner.dp_size * planner.micro_batches)
    draws = min(max(_DRAWS, math.ceil(_STEPS / steps * len(stream))), len(stream))
    rows = stream[np.arange(draws) * len(stream) // draws]
    return SampleTable.create(table.shapes, table.sequence_lengths, table.shape_id[rows], start=table.start[rows])
