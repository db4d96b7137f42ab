"""What micro-batches took, by shape, and the step-time model that a run's own measurements give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.cost.points import Points, weighted_median
from lightning_videoscale.cost.weighted_fit import fit_step_time
from lightning_videoscale.data.planning import Balance
from lightning_videoscale.report.comparison import budget_of
from lightning_videoscale.report.reading import LoggedRecord


class ShapeTimes(NamedTuple):
    """Micro-batches of one shape and size: how many there were, fillers among them, and their median seconds."""

    frames: int
    height: int
    width: int
    tokens: int
    samples: int
    micro_batches: int
    fillers: int
    seconds: float


@dataclass(frozen=True)
class Bucket:
    """One row of the bucket table: what was trained of one shape.

    Attributes:
        shape: Frames, height, width.
        tokens: S of one sample.
        samples: Samples trained on.
        share: Of the time of all micro-batches, in [0, 1].
        usual: The most frequent kind of micro-batch.
        before: Batch size by the first budget of the run; None without a plan.
        after: By the last.
        predicted: Seconds of the usual micro-batch by the model; None without one.
    """

    shape: tuple[int, int, int]
    tokens: int
    samples: int
    share: float
    usual: ShapeTimes
    before: int | None
    after: int | None
    predicted: float | None


def kinds_of(windows: Sequence[LoggedRecord]) -> list[ShapeTimes]:
    """The micro-batches of all windows, those of one shape and size together, by sequence length."""
    found: dict[tuple[int, ...], list[tuple[int, int, float]]] = defaultdict(list)
    for window in windows:
        for *shape, count, fillers, seconds in window["batches"]:
            found[tuple(shape)].append((count, fillers, seconds))
    kinds = [
        ShapeTimes._make((*shape, sum(n for n, _, _ in seen), sum(n for _, n, _ in seen), _median(seen)))
        for shape, seen in found.items()
    ]
    return sorted(kinds, key=lambda kind: (kind.tokens, kind[:3], kind.samples))


def fit(kinds: Sequence[ShapeTimes]) -> StepTimeModel | None:
    """The model of the run's own measurements; None where they are too few, or do not grow with the work."""
    names = ("samples", "tokens", "seconds", "micro_batches")
    try:
        return fit_step_time(Points(*(np.array([getattr(kind, name) for kind in kinds], np.float64) for name in names)))
    except ValueError:
        return None


def error_of(model: StepTimeModel, kinds: Sequence[ShapeTimes]) -> float:
    """Median relative error of a model over micro-batches, after one factor for the speed of the machine."""
    ratio = np.array([kind.seconds / model.predict(kind.samples, kind.tokens) for kind in kinds], np.float64)
    weights = np.array([kind.micro_batches for kind in kinds])
    ratio /= weighted_median(ratio, weights)
    return weighted_median(np.abs(ratio - 1), weights)


def buckets_of(kinds: Sequence[ShapeTimes], plans: Sequence[LoggedRecord], model: StepTimeModel | None) -> list[Bucket]:
    """The bucket table, the shape that took the most time first."""
    total = sum(kind.micro_batches * kind.seconds for kind in kinds)
    by_shape: dict[tuple[int, int, int, int], list[ShapeTimes]] = defaultdict(list)
    for kind in kinds:
        by_shape[kind[:4]].append(kind)
    rows = []
    for (*shape, tokens), same in by_shape.items():
        usual = max(same, key=lambda kind: kind.micro_batches)
        rows.append(
            Bucket(
                shape=(shape[0], shape[1], shape[2]),
                tokens=tokens,
                samples=sum(kind.samples * (kind.micro_batches - kind.fillers) for kind in same),
                share=sum(kind.micro_batches * kind.seconds for kind in same) / total,
                usual=usual,
                before=batch_size(plans[0], tokens) if plans else None,
                after=batch_size(plans[-1], tokens) if plans else None,
                predicted=float(model.predict(usual.samples, tokens)) if model is not None else None,
            )
        )
    return sorted(rows, key=lambda row: -row.share)


def batch_size(plan: LoggedRecord, tokens: int) -> int:
    """Samples of a full micro-batch under a plan's budget."""
    budget = budget_of(plan)
    balance: Balance = plan["balance"]
    if balance == "equal_token":
        budget = budget.memory_alone()
    return budget.batch_size(tokens)


def _median(seen: Sequence[tuple[int, int, float]]) -> float:
    """Median of the windows' medians, each with the weight of its micro-batches."""
    return weighted_median(np.array([s for *_, s in seen]), np.array([n for n, *_ in seen]))
