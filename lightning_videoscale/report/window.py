"""From what all ranks measured over some steps to the `window` record of the run log."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.timing import StepTimes


class MicroBatchRow(NamedTuple):
    """One micro-batch on one rank, all numbers; what is not known of the batch is 0.

    Attributes:
        dp_rank: The data-parallel rank.
        frames: F of the batch.
        height: H.
        width: W.
        tokens: S of one sample.
        samples: B.
        counts: 1, or 0 where the batch only fills a slot.
        predicted_cost: What the planner says that it costs.
    """

    dp_rank: float
    frames: float
    height: float
    width: float
    tokens: float
    samples: float
    counts: float
    predicted_cost: float

    @classmethod
    def of(cls, dp_rank: int, meta: Any) -> MicroBatchRow:
        """Reads the ``meta`` of a batch; None, where it has none, leaves zeros."""
        if meta is None:
            return cls(dp_rank, 0, 0, 0, 0, 0, 0, 0)
        frames, height, width = (getattr(meta, name, 0) for name in ("frames", "height", "width"))
        cost = getattr(meta, "predicted_cost", 0.0)
        counts = float(meta.loss_weight != 0)
        return cls(dp_rank, frames, height, width, meta.sequence_length, meta.samples, counts, cost)


def window_record(everything: Tensor, steps: list[int]) -> dict[str, Any]:
    """Returns the fields of a `window` record; see `log` for what they mean.

    Args:
        everything: (ranks, micro_batches, columns) float64: `MicroBatchRow`, then `StepTimes`.
        steps: Micro-batches of each optimizer step, in order.
    """
    rows, times = everything.split([len(MicroBatchRow._fields), len(StepTimes._fields)], dim=2)
    parts = dict(zip(StepTimes._fields, times.unbind(dim=2), strict=True))
    groups = _groups(rows[:, 0, 0])
    first = rows[[group[0] for group in groups]]  # peers work on the same batches
    columns = dict(zip(MicroBatchRow._fields, first.unbind(dim=2), strict=True))
    compute = parts["forward"] + parts["backward"]
    slowest = torch.stack([compute[group].amax(dim=0) for group in groups])
    tokens = columns["samples"] * columns["tokens"]
    known = bool((tokens > 0).all())
    by_step = [_per_step(quantity, steps) for quantity in (slowest, tokens * columns["tokens"])]
    cost = _per_step(columns["predicted_cost"], steps)
    return {
        "steps": len(steps),
        "seconds": float((times.sum(dim=2) - parts["other"]).sum(dim=1).max()),
        "tokens": int((tokens * columns["counts"]).sum()) if known else None,
        "samples": int((columns["samples"] * columns["counts"]).sum()) if known else None,
        "cv_step": ((by_step[0].amax(0) - by_step[0].amin(0)) / by_step[0].amax(0)).tolist(),
        "compute_cv": _cv(by_step[1]) if known else None,
        "cost_cv": _cv(cost) if bool((cost > 0).all()) else None,
        "slowest_seconds": float(by_step[0].amax(0).sum()),
        "idle_seconds": float((by_step[0].amax(0) - by_step[0].mean(0)).sum()),
        "ranks": {name: part.sum(dim=1).tolist() for name, part in parts.items()},
        "batches": _batches(first.flatten(0, 1), slowest.flatten()) if known else [],
    }


def _groups(dp_rank_of: Tensor) -> list[list[int]]:
    """Global ranks of every data-parallel rank."""
    ranks = dp_rank_of.tolist()
    return [[rank for rank, dp in enumerate(ranks) if dp == wanted] for wanted in sorted(set(ranks))]


def _per_step(quantity: Tensor, steps: list[int]) -> Tensor:
    """(dp_ranks, micro_batches) summed to (dp_ranks, steps)."""
    return torch.stack([part.sum(dim=1) for part in quantity.split(steps, dim=1)], dim=1)


def _cv(quantity: Tensor) -> list[float]:
    spread: list[float] = (quantity.std(dim=0, correction=0) / quantity.mean(dim=0)).tolist()
    return spread


def _batches(rows: Tensor, seconds: Tensor) -> list[list[float]]:
    """Micro-batches of one shape and size together: [frames, height, width, S, B, count, fillers, median seconds]."""
    kinds, kind = rows[:, 1:6].unique(dim=0, return_inverse=True)
    counts = rows[:, MicroBatchRow._fields.index("counts")]
    table = []
    for number, shape in enumerate(kinds.long().tolist()):
        chosen = kind == number
        fillers = int((counts[chosen] == 0).sum())
        table.append([*shape, int(chosen.sum()), fillers, float(seconds[chosen].median())])
    return table
