"""What steps would take, by what their micro-batches were measured to take: a rank's sum, and the slowest rank's time.

A micro-batch takes what `ReplayedCosts` says of its shape, with the noise that was measured: in the table of costs, or
in other runs, which see a shape more often than the table, and in the middle of a training. A step takes what the
slowest rank does, by where ranks wait (`Waits`). Then comes what every step takes beside its micro-batches: the
optimizer, and the exchange that nothing hides.

Under DDP a rank that is ahead computes more slowly while it waits: NCCL's kernels hold multiprocessors until the other
ranks have the gradients too (`benchmarks/strategies/gradient_exchange.py`). No step takes longer by that. So of the
runs, only micro-batches of ranks that nobody else made wait say what a shape takes, and `Replay.ahead` what the others
take longer. Where the host decides, none does. `AHEAD` and `HOST`, the bounds of both, move CV_step and no step's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.callbacks.replayed_costs import ReplayedCosts
from benchmarks.data.balance_figures import Columns, Waits, slowest
from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.data.planning.epoch_plan import EpochPlan

Row = Mapping[str, Any]
OFTEN = 3
"""How often runs must have seen a shape, that they say more than the table."""
AHEAD = 0.8
"""Share of the slowest rank's time below which a rank is far ahead."""

HOST = 1.5
"""Times of the shortest micro-batch of all, up to which the host decides what one takes."""


def replay_of(
    table: Sequence[Row], runs: Sequence[Row], step_time: StepTimeModel, waits: Waits, but: Row | None = None
) -> Replay:
    """A clock by the table of costs, and by all runs but one.

    Args:
        table: Rows of a `ShapeMatrix`.
        runs: Rows of `data/balances`.
        step_time: What is planned with.
        waits: Where ranks wait for each other.
        but: The run that is left out.
    """
    others = [run for run in runs if run is not but]
    replay = Replay(costs_of(table, others, waits), step_time, waits)
    return replay._replace(ahead=replay.measure_ahead(others))


def costs_of(table: Sequence[Row], runs: Sequence[Row], waits: Waits) -> ReplayedCosts:
    """What micro-batches take by the table of costs, and by runs of `data/balances`."""
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for run in runs:
        last = _is_slowest(_measured(run), waits)
        columns = (np.array(run[name])[last] for name in ("samples", "sequence_lengths", "micro_batch_seconds"))
        for samples, length, seconds in zip(*columns, strict=True):
            seen[int(samples), int(length)].append(float(seconds))
    often = {shape: _measured_often(*shape, seconds) for shape, seconds in seen.items() if len(seconds) >= OFTEN}
    others = [row for row in table if (row["samples"], row["sequence_length"]) not in often]
    return ReplayedCosts.of_rows([*others, *often.values()])


def _measured_often(samples: int, length: int, seconds: Sequence[float]) -> Row:
    """As a row of the table; the spread is one whose noise, `ReplayedCosts.noise`, has the mean that was measured."""
    quartile = float(np.quantile(seconds, 0.25))
    spread = 3 * (float(np.mean(seconds)) / quartile - 1)
    shape = {"samples": samples, "sequence_length": length}
    return shape | {"outcome": "measured", "seconds": quartile, "spread": max(spread, 0.0)}


class Replay(NamedTuple):
    """A clock of steps.

    Attributes:
        costs: What micro-batches were measured to take.
        step_time: What is planned with.
        waits: Where ranks wait for each other.
        ahead: How many times as long the last micro-batch of a step takes on a rank that is ahead, at most.
    """

    costs: ReplayedCosts
    step_time: StepTimeModel
    waits: Waits = "steps"
    ahead: float = 1.0

    def steps(
        self,
        samples: ArrayLike,
        lengths: ArrayLike,
        counts: ArrayLike,
        overhead: float = 0.0,
        draws: np.random.Generator | None = None,
    ) -> Columns:
        """What `columns_of` gives of a measured run.

        Args:
            samples: B of each micro-batch, (steps, ranks, micro-batches).
            lengths: S likewise.
            counts: Whether each is progress, likewise.
            overhead: Seconds of a step beside its micro-batches.
            draws: Of the noise; None: there is none.
        """
        b, s = np.asarray(samples, np.float64), np.asarray(lengths, np.float64)
        seconds = self.costs.predict(b, s)
        if draws is not None:
            seconds = seconds * self.costs.noise(b, s, draws)
        if self.waits == "steps":
            of_rank = seconds.sum(axis=2)
            until_slowest = of_rank.max(axis=1, keepdims=True) - of_rank
            longer = np.where(self._device_decides(seconds[..., -1]), (self.ahead - 1) * seconds[..., -1], 0.0)
            seconds[..., -1] += np.minimum(longer, until_slowest)
        total = (slowest(seconds, self.waits) + overhead)[:, None, None] / seconds.shape[2]
        total = np.broadcast_to(total, seconds.shape)
        return {
            "compute": seconds,
            "wait": total - seconds,
            "total": total,
            "samples": b,
            "sequence_length": s,
            "predicted_cost": self.step_time.predict(b, s),
            "counts": np.asarray(counts, np.float64),
        }

    def of_row(self, row: Row, overhead: float, draws: np.random.Generator | None = None) -> Columns:
        """The steps that a row of `data/balances` has measured."""
        return self.steps(row["samples"], row["sequence_lengths"], row["counts"], overhead, draws)

    def of_plan(self, plan: EpochPlan, overhead: float, draws: np.random.Generator | None = None) -> Columns:
        """The steps of a plan."""
        samples, lengths = np.diff(plan.starts), plan.table.sequence_lengths[plan.shape_id]
        grid = plan.grid
        return self.steps(samples[grid], lengths[grid], ~plan.filler[grid], overhead, draws)

    def overhead(self, rows: Sequence[Row], micro_batches: int, but: Row | None = None) -> float:
        """Seconds of a step beside its micro-batches: the median of all runs but one with the fewest micro-batches.

        There it hardly matters where ranks wait. Under FSDP2 every micro-batch has its exchange, under DDP a step.
        """
        others = [row for row in rows if row is not but]
        fewest = min((row["micro_batches"] for row in others), default=1)
        beside = [
            np.array(row["step_seconds"]) - slowest(_measured(row), self.waits)
            for row in others
            if row["micro_batches"] == fewest
        ]
        times = micro_batches / fewest if self.waits == "slots" else 1.0
        return times * float(np.median(np.concatenate(beside))) if beside else 0.0

    def measure_ahead(self, rows: Sequence[Row]) -> float:
        """`ahead` of runs, by ranks that were ahead by enough to be as slow as they get; 1 where there are none."""
        measured, undisturbed = 0.0, 0.0
        for row in rows if self.waits == "steps" else ():
            seconds, costs = _measured(row), self.of_row(row, 0.0)["compute"]
            of_rank = costs.sum(axis=2)
            ahead = of_rank < AHEAD * of_rank.max(axis=1, keepdims=True)
            ahead &= self._device_decides(costs[..., -1])
            measured += float(seconds[..., -1][ahead].sum())
            undisturbed += float(costs[..., -1][ahead].sum())
        return max(measured / undisturbed, 1.0) if undisturbed else 1.0

    def _device_decides(self, seconds: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether the device is busy enough that multiprocessors may be missing."""
        return np.asarray(seconds > HOST * self.costs.points.seconds.min(), np.bool_)

    def error_of_waits(self, row: Row, overhead: float) -> float:
        """How far off steps are that are made of the very times of a run's micro-batches: where ranks wait, alone."""
        made = slowest(_measured(row), self.waits) + overhead
        return float(made.sum() / np.sum(row["step_seconds"]) - 1)

    def drift(self, row: Row) -> float:
        """Seconds that micro-batches took in a run, over those that the table has of them without noise."""
        return float(_measured(row).sum() / self.of_row(row, 0.0)["compute"].sum())


def _is_slowest(seconds: NDArray[np.float64], waits: Waits) -> NDArray[np.bool_]:
    """Which micro-batches, (steps, ranks, micro-batches), are of ranks that nobody else made wait."""
    taken = seconds if waits == "slots" else seconds.sum(axis=2, keepdims=True)
    return np.broadcast_to(taken == taken.max(axis=1, keepdims=True), seconds.shape)


def _measured(row: Row) -> NDArray[np.float64]:
    return np.array(row["micro_batch_seconds"], np.float64)
