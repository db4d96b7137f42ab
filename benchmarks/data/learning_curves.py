"""What the curves of `learning.py` say: whether the planner harms learning per sample, and is ahead per second."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]

POINTS = 100  # at which curves are compared
BEGINNING = 0.2  # share of the samples before the first of them
ENOUGH = 0.9  # share of the points at which two curves that are alike lie within the spread


def judge(rows: list[Row], losses: str) -> Row:
    """States what the rows of finished runs say; nothing of runs that are missing.

    Args:
        rows: Of the runs.
        losses: Which of their curves counts: ``losses`` of the weights, or ``averaged_losses`` of their average.

    The spread at a number of samples is highest less lowest loss of the seeds of a balance, the larger of both.
    Curves that differ by no more at nine tenths of the points are within it: the means of the two balances, and runs
    that differ in something else from ``planned`` of the same seed.
    """
    rows = [row | {"losses": row[losses]} for row in rows]
    planned, equal = (
        [row for row in rows if _is_plain(row) and row["balance"] == b] for b in ("planned", "equal_token")
    )
    if min(len(planned), len(equal)) < 2:
        return {}
    samples = _common_samples(rows)
    of_planned, of_equal = (np.array([_losses_at(row, samples) for row in mine]) for mine in (planned, equal))
    spread = np.maximum(np.ptp(of_planned, axis=0), np.ptp(of_equal, axis=0))
    found = {"per_sample": _beside(of_planned.mean(axis=0), of_equal.mean(axis=0), spread)}
    found["per_second"] = _race(planned, equal)
    for row in rows:
        if not _is_plain(row):
            name = "kernels off" if not row["fused"] else f"sp = {row['sp']}"
            same_seed = next(
                losses for other, losses in zip(planned, of_planned, strict=True) if other["seed"] == row["seed"]
            )
            found[name] = _beside(_losses_at(row, samples), same_seed, spread)
    return found


def _beside(losses: NDArray[np.float64], others: NDArray[np.float64], spread: NDArray[np.float64]) -> Row:
    gap = losses - others
    share = float(np.mean(np.abs(gap) <= spread))
    return {
        "relative_gap": round(float(np.mean(gap / others)), 5),
        "relative_spread": round(float(np.mean(spread / others)), 5),
        "share_within_spread": round(share, 3),
        "within_spread": share >= ENOUGH,
    }


def _race(planned: list[Row], equal: list[Row]) -> Row:
    """Seconds to the lowest loss that all runs reach; ahead is who is so in the mean of the seeds."""
    level = max(min(row["losses"]) for row in [*planned, *equal])
    seconds = {
        name: [seconds_to(row, level) for row in rows] for name, rows in (("planned", planned), ("equal", equal))
    }
    rate = [np.mean([row["samples"][-1] / row["seconds"][-1] for row in rows]) for rows in (planned, equal)]
    return {
        "loss": level,
        "planned_seconds": np.round(seconds["planned"], 2).tolist(),
        "equal_token_seconds": np.round(seconds["equal"], 2).tolist(),
        "samples_per_second_over_equal_token": round(float(rate[0] / rate[1]), 4),
        "ahead": bool(np.mean(seconds["planned"]) < np.mean(seconds["equal"])),
        "every_seed_ahead": max(seconds["planned"]) < min(seconds["equal"]),
    }


def seconds_to(row: Row, level: float) -> float:
    """When a run first has a loss, on the line between the two validations around it."""
    losses, seconds = row["losses"], row["seconds"]
    after = next(number for number, loss in enumerate(losses) if loss <= level)
    if after == 0:
        return float(seconds[0])
    part = (losses[after - 1] - level) / (losses[after - 1] - losses[after])
    return float(seconds[after - 1] + part * (seconds[after] - seconds[after - 1]))


def _common_samples(rows: list[Row]) -> NDArray[np.float64]:
    last = min(row["samples"][-1] for row in rows)
    return np.linspace(BEGINNING * last, last, POINTS)


def _losses_at(row: Row, samples: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.interp(samples, row["samples"], row["losses"])


def _is_plain(row: Row) -> bool:
    """Whether the run is one of those that only balance and seed tell apart."""
    return bool(row["fused"] and row["sp"] == 1)
