"""How good a plan is, in the figures that the literature uses, from predicted costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_videoscale.cost.spread import compute_cv, cv_step
from lightning_videoscale.data.planning.diversity import distinct, distinct_at_random
from lightning_videoscale.data.planning.epoch_plan import EpochPlan
from lightning_videoscale.data.planning.sample_weights import relative_weights, weights_and_samples
from lightning_videoscale.data.planning.shapes import ClipShape


class StepSpreads(NamedTuple):
    """How unequal the ranks are in each step of a plan, arrays (steps,) of fractions.

    Attributes:
        cv_step: (max - min) / max of the ranks' cost.
        compute_cv: std / mean over the ranks of the sum of B * S².
        cost_cv: std / mean over the ranks of the cost.
        idle: 1 - mean / max of the ranks' cost: what they wait for the slowest, once a step or in each micro-batch.
    """

    cv_step: NDArray[np.float64]
    compute_cv: NDArray[np.float64]
    cost_cv: NDArray[np.float64]
    idle: NDArray[np.float64]

    @classmethod
    def of(cls, plan: EpochPlan, cost: NDArray[np.float64] | None = None, in_slots: bool = False) -> StepSpreads:
        """Computes them.

        Args:
            plan: The plan.
            cost: (M,) what each micro-batch costs; None: what the plan predicts.
            in_slots: Whether ranks wait for each other in every micro-batch.
        """
        lengths = plan.table.sequence_lengths[plan.shape_id]
        loads = np.diff(plan.starts) * lengths * lengths
        load, by_slot = (
            torch.from_numpy(of_batch[plan.grid].T).double()  # (micro-batches, ranks, steps)
            for of_batch in (loads, plan.cost if cost is None else cost)
        )
        load, by_rank = load.sum(dim=0), by_slot.sum(dim=0)
        slowest = by_slot.amax(dim=1).sum(dim=0) if in_slots else by_rank.amax(dim=0)
        idle = 1 - by_rank.mean(dim=0) / slowest
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
        least_weight: What a sample counts for in the gradients of the epoch over the mean of all samples, of the shape
            that counts least: below 1, where steps hold different numbers of samples and each counts as one.
        most_weight: The same of the shape that counts most.
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
    least_weight: float
    most_weight: float

    @classmethod
    def of(cls, *plans: EpochPlan) -> PlanFigures:
        """Computes the figures of a plan of a whole epoch, or of those of all of its windows."""
        sums = FigureSums()
        for plan in plans:
            sums.add(plan)
        return sums.figures()

    def throughput(self, in_slots: bool = False) -> float:
        """Tokens of all ranks over the slowest ranks' cost, of steps or, ``in_slots``, of micro-batches."""
        return self.tokens_per_cost / self.efficiency * self.at_work(in_slots)

    def at_work(self, in_slots: bool = False) -> float:
        """Share of its time that the mean rank does not wait for the slowest: of a step or, ``in_slots``, a slot."""
        return 1 / self.slot_time if in_slots else self.efficiency

    def to_dict(self) -> dict[str, float]:
        """Returns plain numbers, for JSON."""
        return asdict(self)


class FigureSums:
    """Adds up what the figures of an epoch are made of, window by window: no plan need stay in memory."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._shapes: Counter[ClipShape] = Counter()  # micro-batches of each; windows number shapes differently
        self._weights: Counter[ClipShape] = Counter()
        self._samples: Counter[ClipShape] = Counter()
        self._delays: Counter[float] = Counter()
        self._slots = 1

    def add(self, plan: EpochPlan) -> None:
        """Adds a plan; of the same ranks and micro-batches as those before."""
        if not plan.steps:
            return
        sizes = np.diff(plan.starts)
        tokens = sizes * plan.table.sequence_lengths[plan.shape_id]
        by_slot, counted, spreads = plan.cost[plan.grid], ~plan.filler, StepSpreads.of(plan)
        by_rank = by_slot.sum(axis=2)
        shapes = plan.shape_id[plan.grid].reshape(plan.steps, -1)
        self._slots = shapes.shape[1]
        self._sums.update(
            steps=plan.steps, samples=int(sizes[counted].sum()),
            tokens=int(tokens.sum()), counted_tokens=int(tokens[counted].sum()),
            cv_step=spreads.cv_step.sum(), compute_cv=spreads.compute_cv.sum(), cost_cv=spreads.cost_cv.sum(),
            mean=by_rank.mean(axis=1).sum(), slowest=by_rank.max(axis=1).sum(),
            slot_mean=by_slot.mean(axis=1).sum(), slowest_slot=by_slot.max(axis=1).sum(),
            distinct=distinct(shapes).sum(),
        )  # fmt: skip
        numbers, counts = np.unique(shapes, return_counts=True)
        self._shapes.update({plan.table.shapes[n]: count for n, count in zip(numbers, counts.tolist(), strict=True)})
        for sums, of_shape in zip((self._weights, self._samples), weights_and_samples(plan), strict=True):
            sums.update(dict(zip(plan.table.shapes, of_shape.tolist(), strict=True)))
        self._delays.update(dict(zip(*(x.tolist() for x in np.unique(delays(plan), return_counts=True)), strict=True)))

    def figures(self) -> PlanFigures:
        """The figures of all that was added, which must be a step at least."""
        sums, steps = self._sums, self._sums["steps"]
        at_random = distinct_at_random(np.array([*self._shapes.values()]), self._slots)
        weights = relative_weights(*(np.array([*each.values()]) for each in (self._weights, self._samples)))
        return PlanFigures(
            cv_step=float(sums["cv_step"] / steps),
            compute_cv=float(sums["compute_cv"] / steps),
            cost_cv=float(sums["cost_cv"] / steps),
            efficiency=float(sums["mean"] / sums["slowest"]),
            slot_time=float(sums["slowest_slot"] / sums["slot_mean"]),
            padding=1 - sums["counted_tokens"] / sums["tokens"],
            diversity=float(sums["distinct"] / steps / at_random),
            delay_p99=_quantile(self._delays, 0.99),
            steps=steps,
            samples=sums["samples"],
            tokens_per_cost=float(sums["counted_tokens"] / sums["slowest"]),
            least_weight=float(np.nanmin(weights)),
            most_weight=float(np.nanmax(weights)),
        )


def delays(plan: EpochPlan) -> NDArray[np.float64]:
    """Steps that each sample is trained after (or, negative, before) its place in the stream; fillers left out.

    What a window carries has its place before the window's first step, at the pace of the window.
    """
    step_of = np.empty(len(plan.cost), np.int64)
    step_of[plan.grid.reshape(plan.steps, -1)] = np.arange(plan.steps)[:, None]
    counted = np.repeat(~plan.filler, np.diff(plan.starts))
    steps = np.repeat(step_of, np.diff(plan.starts))[counted].astype(np.float64)
    draws, first, length = plan.members[counted], 0, len(plan.stream)
    if plan.window is not None:
        draws, first, length = plan.window.draws[draws], plan.window.first, plan.window.last - plan.window.first
    return steps - np.floor((draws - first) / length * plan.steps)


def _quantile(counts: Counter[float], share: float) -> float:
    """The quantile of values that come so often; between two of them, in proportion."""
    values = np.array(sorted(counts))
    ends = np.cumsum([counts[value] for value in values.tolist()])
    place = share * (ends[-1] - 1)
    below, above = values[np.searchsorted(ends, [np.floor(place), np.ceil(place)], side="right")]
    return float(below + (above - below) * (place % 1))
