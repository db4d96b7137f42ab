"""The figures of one balance's run, from what every micro-batch of every rank was and took."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[np.float64]]
"""Field by field, (steps, ranks, micro-batches)."""

FIELDS = ("compute", "wait", "total", "samples", "sequence_length", "predicted_cost", "counts")
"""Compute is what cost models are fitted to: without waits, with the exchanges of a sequence-parallel group."""

Waits = Literal["steps", "slots"]
"""Where ranks wait for each other: at the end of a step, or at every micro-batch, as under FSDP2."""

_TIMES = FIELDS[:3]


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


def of_groups(c: Columns, ranks: int) -> Columns:
    """The same of sequence-parallel groups of so many neighbouring ranks: a group takes as long as its slowest."""
    steps, world, k = c["compute"].shape
    by_group = {name: x.reshape(steps, world // ranks, ranks, k) for name, x in c.items()}
    return {name: x.max(axis=2) if name in _TIMES else x[:, :, 0] for name, x in by_group.items()}


def slowest(seconds: NDArray[np.float64], waits: Waits) -> NDArray[np.float64]:
    """What steps take, (steps,), of micro-batches that take (steps, ranks, micro-batches)."""
    taken = seconds.max(axis=1).sum(axis=1) if waits == "slots" else seconds.sum(axis=2).max(axis=1)
    return np.asarray(taken, np.float64)


def row_of(balance: str, k: int, c: Columns, waits: Waits = "steps") -> dict[str, Any]:
    """The row of one run: its figures, and what they were made of."""
    return {"balance": balance, "micro_batches": k, **figures_of(c, waits), **series_of(c)}


def figures_of(c: Columns, waits: Waits = "steps") -> dict[str, Any]:
    """The figures of one run, measured or replayed."""
    tokens = c["samples"] * c["sequence_length"]
    compute, cost = c["compute"].sum(axis=2), c["predicted_cost"].sum(axis=2)  # steps, ranks
    load = (tokens * c["sequence_length"]).sum(axis=2)
    wall = c["total"].sum(axis=2).mean(axis=1)  # ranks leave a step together
    counted = float((tokens * c["counts"]).sum())
    cv_step = _range_over_max(compute)
    ceiling = counted / float(cost.mean(axis=1).sum())
    behind = slowest(c["compute"], waits)[:, None] - compute
    errors = np.abs(c["predicted_cost"] / c["compute"] - 1)
    return {
        "steps": len(wall),
        "tokens_per_second": counted / float(wall.sum()),
        "samples_per_second": float((c["samples"] * c["counts"]).sum() / wall.sum()),
        "ceiling_tokens_per_second": ceiling,
        "share_of_ceiling": counted / float(wall.sum()) / ceiling,
        "share_of_measured_compute": float(compute.mean(axis=1).sum() / wall.sum()),
        "predicted_mean_over_max": float(cost.mean(axis=1).sum() / slowest(c["predicted_cost"], waits).sum()),
        "cv_step_mean": float(np.mean(cv_step)),
        "cv_step_median": float(np.median(cv_step)),
        "cv_step_p95": float(np.quantile(cv_step, 0.95)),
        "cv_slot_mean": float(np.mean(_range_over_max(c["compute"]))),
        "compute_cv": _spread(compute),
        "cost_cv": _spread(cost),
        "b_s2_cv": _spread(load),
        "cost_error_median": float(np.median(errors)),
        "cost_error_p95": float(np.quantile(errors, 0.95)),
        "step_seconds_median": float(np.median(wall)),
        "wait_seconds_median": float(np.median(c["wait"].sum(axis=2))),
        "behind_slowest_seconds_median": float(np.median(behind)),
        "behind_slowest_share": float(behind.mean(axis=1).sum() / wall.sum()),
    }


def series_of(c: Columns) -> dict[str, Any]:
    """Step by step, rank by rank and, from ``samples`` on, by micro-batch: what the same run is replayed from."""
    return {
        "step_seconds": _rounded(c["total"].sum(axis=2).mean(axis=1)),
        "compute_seconds": _rounded(c["compute"].sum(axis=2)),
        "wait_seconds": _rounded(c["wait"].sum(axis=2)),
        "predicted_seconds": _rounded(c["predicted_cost"].sum(axis=2)),
        "samples": c["samples"].astype(int).tolist(),
        "sequence_lengths": c["sequence_length"].astype(int).tolist(),
        "counts": c["counts"].astype(int).tolist(),
        "micro_batch_seconds": _rounded(c["compute"]),
    }


def _range_over_max(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the ranks, which are axis 1."""
    return np.asarray((x.max(axis=1) - x.min(axis=1)) / x.max(axis=1), np.float64)


def _spread(x: NDArray[np.float64]) -> float:
    return float(np.mean(x.std(axis=1) / x.mean(axis=1)))


def _rounded(x: NDArray[np.float64]) -> Any:
    return np.round(x, 4).tolist()
