"""How good a plan is, in the figures that the literature uses, from predicted costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_videoscale.cost.spread import compute_cv, cv_step
from lightning_videoscale.data.planning.diversity import diversity
from lightning_videoscale.data.planning.epoch_plan import EpochPlan


class StepSpreads(NamedTuple):
    """How unequal the ranks are in each step of a plan, arrays (steps,) of fractions.

    Attributes:
        cv_step: (max - min) / max of the ranks' cost.
        compute_cv: std / mean over the ranks of the sum of B * S².
        cost_cv: std / mean over the ranks of the cost.
        idle: 1 - mean / max of the ranks' cost: what they wait for the slowest.
    """

    cv_step: NDArray[np.float64]
    compute_cv: NDArray[np.float64]
    cost_cv: NDArray[np.float64]
    idle: NDArray[np.float64]

    @classmethod
    def of(cls, plan: EpochPlan, cost: NDArray[np.float64] | None = None) -> StepSpreads:
        """Computes them.

        Args:
            plan: The plan.
            cost: (M,) what each micro-batch costs; None: what the plan predicts.
        """
        lengths = plan.table.sequence_lengths[plan.shape_id]
        loads = np.diff(plan.starts) * lengths * lengths
        load, by_rank = (
            torch.from_numpy(of_batch[plan.grid].sum(axis=2).T).double()
            for of_batch in (loads, plan.cost if cost is None else cost)
        )
        idle = 1 - by_rank.mean(dim=0) / by_rank.amax(dim=0)
        return cls(*(x.numpy() for x in (cv_step(by_rank), compute_cv(load), compute_cv(by_rank), idle)))


@dataclass(frozen=True)
class PlanFigures:
    """Means over the steps of a plan; fractions, where nothing else is said.

    Attributes:
        cv_step: (max - min) / max of the ranks' predicted cost (AdaptiveLoad, section on metrics).
        compute_cv: std / mean over the ranks of the sum of B * S² (the paper's physical load).
        cost_cv: std / mean over the ranks of the predicted cost: what is balanced.
        efficiency: Predicted cost over what it is when all ranks wait for the slowest at the end of every step.
        slot_time: Time when ranks wait for each other at every micro-batch (FSDP2, ZeRO-3) over the ideal; 1 or more.
        padding: Share of tokens in micro-batches that only fill slots.
        diversity: Different shapes in a step over how many as many random micro-batches would have.
        delay_p99: Steps that a sample is trained after its place in the stream, 99th percentile.
        steps: Optimizer steps.
        samples: Samples that count.
        tokens_per_cost: Tokens of all ranks over the slowest ranks' cost: per second, where the cost is in seconds.
    """

    cv_step: float
    compute_cv: float
    cost_cv: float
    efficiency: float
    slot_time: float
    padding: float
    diversity: float
    delay_p99: float
    steps: int
    samples: int
    tokens_per_cost: float

    @classmethod
    def of(cls, plan: EpochPlan) -> PlanFigures:
        """Computes the figures of a plan of a whole epoch."""
        sizes = np.diff(plan.starts)
        lengths = plan.table.sequence_lengths[plan.shape_id]
        tokens = sizes * lengths
        by_slot = plan.cost[plan.grid]
        by_rank = by_slot.sum(axis=2)
        slowest = by_rank.max(axis=1)
        spreads = StepSpreads.of(plan)
        counted = ~plan.filler
        return cls(
            cv_step=float(spreads.cv_step.mean()),
            compute_cv=float(spreads.compute_cv.mean()),
            cost_cv=float(spreads.cost_cv.mean()),
            efficiency=float(by_rank.mean(axis=1).sum() / slowest.sum()),
            slot_time=float(by_slot.max(axis=1).sum() / by_slot.mean(axis=1).sum()),
            padding=float(tokens[plan.filler].sum() / tokens.sum()),
            diversity=diversity(plan.shape_id[plan.grid].reshape(plan.steps, -1)),
            delay_p99=float(np.quantile(delays(plan), 0.99)),
            steps=plan.steps,
            samples=int(sizes[counted].sum()),
            tokens_per_cost=float(tokens[counted].sum() / slowest.sum()),
        )

    def throughput(self, in_slots: bool = False) -> float:
        """Tokens of all ranks over the slowest ranks' cost, of steps or, ``in_slots``, of micro-batches."""
        return self.tokens_per_cost / self.efficiency * self.at_work(in_slots)

    def at_work(self, in_slots: bool = False) -> float:
        """Share of its time that the mean rank does not wait for the slowest: of a step or, ``in_slots``, a slot."""
        return 1 / self.slot_time if in_slots else self.efficiency

    def to_dict(self) -> dict[str, float]:
        """Returns plain numbers, for JSON."""
        return asdict(self)


def delays(plan: EpochPlan) -> NDArray[np.float64]:
    """Steps that each sample is trained after (or, negative, before) its place in the stream; fillers left out."""
    step_of = np.empty(len(plan.cost), np.int64)
    step_of[plan.grid.reshape(plan.steps, -1)] = np.arange(plan.steps)[:, None]
    counted = np.repeat(~plan.filler, np.diff(plan.starts))
    steps = np.repeat(step_of, np.diff(plan.starts))[counted].astype(np.float64)
    place = plan.members[counted] / len(plan.stream) * plan.steps
    return steps - np.floor(place)
