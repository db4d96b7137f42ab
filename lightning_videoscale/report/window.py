"""From what all ranks did in some steps to the `window` record of the run log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.cost.spread import compute_cv, cv_step
from lightning_videoscale.timing import StepTimes, StepWindow

_SHAPE = ("frames", "height", "width", "sequence_length", "samples")


def window_record(window: StepWindow) -> dict[str, Any]:
    """Returns the fields of a `window` record; `lightning_videoscale.report.log` says what they mean."""
    work, cost = window.of_groups("work"), window.of_groups("predicted_cost")
    samples, length, weight = (window.of_groups(name) for name in ("samples", "sequence_length", "loss_weight"))
    counted, by_step, told = samples * (weight != 0), window.per_step(work), window.tells_loads
    slowest = by_step.amax(dim=0)
    return {
        "steps": window.steps,
        "seconds": float((sum(map(window.column, StepTimes._fields)) - window.column("other")).sum(dim=1).max()),
        "tokens": int((counted * length).sum()) if told else None,
        "samples": int(counted.sum()) if told else None,
        "cv_step": cv_step(by_step).tolist(),
        "compute_cv": compute_cv(window.per_step(samples * length**2)).tolist() if told else None,
        "cost_cv": compute_cv(window.per_step(cost)).tolist() if bool((cost > 0).all()) else None,
        "slowest_seconds": float(slowest.sum()),
        "idle_seconds": float((slowest - by_step.mean(dim=0)).sum()),
        "ranks": {name: window.column(name).sum(dim=1).tolist() for name in StepTimes._fields},
        "batches": _batches(window, weight, work) if told else [],
    }


def _batches(window: StepWindow, weight: Tensor, work: Tensor) -> list[list[float]]:
    """Micro-batches of one shape and size together: [frames, height, width, S, B, count, fillers, median seconds]."""
    shapes = torch.stack([window.of_groups(name).flatten() for name in _SHAPE], dim=1)
    kinds, kind = shapes.unique(dim=0, return_inverse=True)
    fillers, seconds = weight.flatten() == 0, work.flatten()
    table = []
    for number, shape in enumerate(kinds.long().tolist()):
        chosen = kind == number
        median = float(torch.quantile(seconds[chosen], 0.5))
        table.append([*shape, int(chosen.sum()), int(fillers[chosen].sum()), median])
    return table
