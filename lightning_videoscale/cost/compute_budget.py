"""Which compute budget makes the most of a plan.

M_comp says which batch sizes there are, and so which costs micro-batches have. Ranks that train at the same time are to
find micro-batches of one cost, and of different shapes: whether the mix has them depends on where M_comp cuts. Where
one sample of the longest shape is all that M_comp allows, most shapes a little shorter come alone too, at any cost
between half of it and all; a little more room can put them in pairs. No formula tells how much, and planning a sample
of the epoch under each of some budgets does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from lightning_videoscale.cost.budget import BucketBudget

FACTORS = tuple(percent / 100 for percent in range(100, 205, 5))
"""Compute budgets that are tried, over the smallest. Twice as much doubles a step, in time and in samples."""
EQUAL = 0.005
"""Throughputs that differ by less count as equal: a sample of the epoch tells no better, nor does a fit of costs."""


class Figures(Protocol):
    """How good a plan is, such as `data.planning.figures.PlanFigures`."""

    @property
    def diversity(self) -> float:
        """Different shapes in a step over how many as many random micro-batches would have."""

    @property
    def samples(self) -> int:
        """Samples that count."""

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    def throughput(self, in_slots: bool = False) -> float:
        """Tokens of all ranks over the slowest ranks' cost, of steps or, ``in_slots``, of micro-batches."""

    def at_work(self, in_slots: bool = False) -> float:
        """Share of its time that the mean rank does not wait for the slowest."""


F = TypeVar("F", bound=Figures)


class TriedBudget(NamedTuple, Generic[F]):
    """A budget and what it makes of a plan.

    Attributes:
        factor: Its M_comp over the smallest.
        budget: The budget.
        figures: Of the plan, by predicted cost.
        is_diverse: Whether the steps have as many different shapes as was asked for, or else as many as under the
            smallest budget.
    """

    factor: float
    budget: BucketBudget
    figures: F
    is_diverse: bool


def try_budgets(
    smallest: BucketBudget,
    batch_sizes: Callable[[BucketBudget], Hashable],
    plan: Callable[[BucketBudget], F],
    min_diversity: float,
) -> list[TriedBudget[F]]:
    """Plans under a budget and under larger M_comp, each that makes other batches.

    Args:
        smallest: The budget with the smallest M_comp to try.
        batch_sizes: Tells budgets apart that make the same batches.
        plan: Plans under a budget, the same on all ranks.
        min_diversity: Different shapes in a step over how many random draws would have.

    Returns:
        By rising M_comp; the smallest is the first.
    """
    tried: dict[Hashable, TriedBudget[F]] = {}
    least = min_diversity
    for factor in FACTORS:
        budget = replace(smallest, m_comp=smallest.m_comp * factor)
        if (sizes := batch_sizes(budget)) in tried:
            continue
        figures = plan(budget)
        least = min(least, figures.diversity) if not tried else least
        tried[sizes] = TriedBudget(factor, budget, figures, is_diverse=figures.diversity >= least)
    return [*tried.values()]


def best_of(tried: Sequence[TriedBudget[F]], in_slots: bool = False) -> TriedBudget[F]:
    """The smallest budget whose tokens per predicted second are equal to the highest, of those with diverse steps.

    Args:
        tried: By rising M_comp.
        in_slots: Whether ranks wait for each other at every micro-batch, as under FSDP2 and ZeRO-3, or at the end of a
            step, as under DDP.
    """
    throughputs = {each: each.figures.throughput(in_slots) for each in tried if each.is_diverse}
    enough = (1 - EQUAL) * max(throughputs.values())
    return next(each for each, throughput in throughputs.items() if throughput >= enough)
