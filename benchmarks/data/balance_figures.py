"""The figures of one balance's run, from what every micro-batch of every rank was and took."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[np.float64]]
"""Field by field, (steps, ranks, micro-batches)."""

FIELDS = ("compute", "wait", "total", "samples", "sequence_length", "predicted_cost", "counts")


def columns_of(rows_of_ranks: list[list[list[float]]], k: int, warm_up: int) -> Columns:
    """Returns the fields of all micro-batches but those of the first steps.

    Args:
        rows_of_ranks: Of each rank and micro-batch the `FIELDS`.
        k: Micro-batches of a step.
        warm_up: Steps that are left out.
    """
    table = np.array(rows_of_ranks, np.float64)
    by_step = table.reshape(len(table), -1, k, len(FIELDS)).transpose(1, 0, 2, 3)[warm_up:]
    return {name: by_step[..., number] for number, name in enumerate(FIELDS)}


def row_of(balance: str, k: int, c: Columns) -> dict[str, Any]:
    """The figures of one run."""
    tokens = c["samples"] * c["sequence_length"]
    compute, cost = c["compute"].sum(axis=2), c["predicted_cost"].sum(axis=2)  # steps, ranks
    load = (tokens * c["sequence_length"]).sum(axis=2)
    wall = c["total"].sum(axis=2).mean(axis=1)  # ranks leave a step together
    counted = float((tokens * c["counts"]).sum())
    cv_step = (compute.max(axis=1) - compute.min(axis=1)) / compute.max(axis=1)
    ceiling = counted / float(cost.mean(axis=1).sum())
    waits = compute.max(axis=1, keepdims=True) - compute
    errors = np.abs(c["predicted_cost"] / c["compute"] - 1)
    return {
        "balance": balance,
        "micro_batches": k,
        "steps": len(wall),
        "tokens_per_second": counted / float(wall.sum()),
        "ceiling_tokens_per_second": ceiling,
        "share_of_ceiling": counted / float(wall.sum()) / ceiling,
        "share_of_measured_compute": float(compute.mean(axis=1).sum() / wall.sum()),
        "predicted_mean_over_max": float(cost.mean(axis=1).sum() / cost.max(axis=1).sum()),
        "cv_step_mean": float(np.mean(cv_step)),
        "cv_step_median": float(np.median(cv_step)),
        "cv_step_p95": float(np.quantile(cv_step, 0.95)),
        "compute_cv": _spread(compute),
        "cost_cv": _spread(cost),
        "b_s2_cv": _spread(load),
        "cost_error_median": float(np.median(errors)),
        "cost_error_p95": float(np.quantile(errors, 0.95)),
        "step_seconds_median": float(np.median(wall)),
        "wait_seconds_median": float(np.median(c["wait"].sum(axis=2))),
        "behind_slowest_seconds_median": float(np.median(waits)),
        "step_seconds": _rounded(wall),
        "compute_seconds": _rounded(compute),
        "wait_seconds": _rounded(c["wait"].sum(axis=2)),
        "predicted_seconds": _rounded(cost),
    }


def _spread(x: NDArray[np.float64]) -> float:
    return float(np.mean(x.std(axis=1) / x.mean(axis=1)))


def _rounded(x: NDArray[np.float64]) -> Any:
    return np.round(x, 4).tolist()
