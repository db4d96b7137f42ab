"""From what all ranks did in some steps to the `window` record of the run log."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.callbacks.step_window import RankTimes
from lightning_videoscale.data.batch_load import load_of
from lightning_videoscale.timing import StepTimes


class ShapeLoad(NamedTuple):
    """What is known of a micro-batch; zeros where the batch does not tell.

    Attributes:
        frames: F of the batch.
        height: H.
        width: W.
        tokens: S of one sample.
        samples: B.
        counts: 1, or 0 where the batch only fills a gap.
        predicted_cost: Of the planner.
    """

    frames: float = 0.0
    height: float = 0.0
    width: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    counts: float = 0.0
    predicted_cost: float = 0.0

    @classmethod
    def of(cls, batch: object) -> ShapeLoad:
        """Reads a batch."""
        load = load_of(batch)
        if load is None:
            return cls()
        frames, height, width = (float(getattr(load, name, 0)) for name in ("frames", "height", "width"))
        cost = float(getattr(load, "predicted_cost", 0.0))
        counts = float(load.loss_weight != 0.0)
        return cls(frames, height, width, load.sequence_length, load.samples, counts, cost)


def window_record(window: RankTimes) -> dict[str, Any]:
    """Returns the fields of a `window` record; `lightning_videoscale.report.log` says what they mean.

    Args:
        window: The steps, with the fields of `ShapeLoad` for loads.
    """
    rows = window.of_first_peers(window.loads)
    columns = dict(zip(ShapeLoad._fields, rows.unbind(dim=2), strict=True))
    compute = window.of_slowest_peers(window.part("compute"))
    tokens = columns["samples"] * columns["tokens"]
    known = bool((tokens > 0).all())
    by_step = window.per_step(compute)
    slowest = by_step.amax(dim=0)
    cost = window.per_step(columns["predicted_cost"])
    return {
        "steps": len(window.micro_batches),
        "seconds": float((window.times.sum(dim=2) - window.part("other")).sum(dim=1).max()),
        "tokens": int((tokens * columns["counts"]).sum()) if known else None,
        "samples": int((columns["samples"] * columns["counts"]).sum()) if known else None,
        "cv_step": ((slowest - by_step.amin(dim=0)) / slowest).tolist(),
        "compute_cv": _cv(window.per_step(tokens * columns["tokens"])) if known else None,
        "cost_cv": _cv(cost) if bool((cost > 0).all()) else None,
        "slowest_seconds": float(slowest.sum()),
        "idle_seconds": float((slowest - by_step.mean(dim=0)).sum()),
        "ranks": {name: window.part(name).sum(dim=1).tolist() for name in StepTimes._fields},
        "batches": _batches(rows.flatten(0, 1), compute.flatten()) if known else [],
    }


def _cv(quantity: Tensor) -> list[float]:
    spread: list[float] = (quantity.std(dim=0, correction=0) / quantity.mean(dim=0)).tolist()
    return spread


def _batches(rows: Tensor, seconds: Tensor) -> list[list[float]]:
    """Micro-batches of one shape and size together: [frames, height, width, S, B, count, fillers, median seconds]."""
    kinds, kind = rows[:, :5].unique(dim=0, return_inverse=True)
    counts = rows[:, ShapeLoad._fields.index("counts")]
    table = []
    for number, shape in enumerate(kinds.long().tolist()):
        chosen = kind == number
        fillers = int((counts[chosen] == 0).sum())
        table.append([*shape, int(chosen.sum()), fillers, float(torch.quantile(seconds[chosen], 0.5))])
    return table
