"""What a run's log says in short: is it balanced, what did it cost, what should be done."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.data.planning import Balance
from lightning_videoscale.data.planning.figures import StepSpreads
from lightning_videoscale.report.causes import Cause, SlowRank, cause_of, slow_ranks
from lightning_videoscale.report.charts import percent
from lightning_videoscale.report.comparison import predict_balances
from lightning_videoscale.report.costs import ShapeTimes, error_of, fit, kinds_of
from lightning_videoscale.report.drift import Drift, find_drift
from lightning_videoscale.report.judge import BALANCED, Advice, advice_on_run
from lightning_videoscale.report.loading import Loading, loading_of
from lightning_videoscale.report.reading import LoggedRecord, RunRecords

NEARLY_BALANCED = 0.15
"""Median CV_step up to which a run is called nearly balanced."""


class Verdict(NamedTuple):
    """The first thing to read; ``tone`` is good, fair, bad or plain."""

    text: str
    tone: str


@dataclass(frozen=True)
class Findings:
    """Figures of one run, computed from its log when first asked for."""

    run: RunRecords

    @cached_property
    def start(self) -> LoggedRecord:
        """The last `start` record."""
        return self.run.of("start")[-1]

    @cached_property
    def windows(self) -> list[LoggedRecord]:
        """The `window` records."""
        return self.run.of("window")

    def _started(self, kind: str) -> list[tuple[LoggedRecord, LoggedRecord]]:
        """Every record of a kind behind the start that it belongs to."""
        start, found = self.start, []
        for record in self.run.records:
            if record["kind"] == "start":
                start = record
            elif record["kind"] == kind:
                found.append((start, record))
        return found

    @cached_property
    def _trained(self) -> LoggedRecord:
        """The start of the last window, or where there is none the last start."""
        return self._started("window")[-1][0] if self.windows else self.start

    def alike(self, kind: str) -> list[LoggedRecord]:
        """The records of a kind from the devices and ranks of the last window."""
        last = _machine_of(self._trained)
        return [record for start, record in self._started(kind) if _machine_of(start) == last]

    @cached_property
    def comparable(self) -> list[LoggedRecord]:
        """The windows on such devices and as many ranks, divided alike, as the last one: figures depend on them."""
        return self.alike("window")

    @cached_property
    def memory(self) -> list[LoggedRecord]:
        """The `memory` records of those devices."""
        return self.alike("memory")

    @property
    def memory_gib(self) -> float | None:
        """Memory of one of those devices; None where the log does not tell."""
        capacity: float | None = self._trained["machine"].get("memory_gib")
        return capacity

    @cached_property
    def plans(self) -> list[LoggedRecord]:
        """The `plan` records."""
        return self.run.of("plan")

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the log and the figures, in sentences."""
        steps = sum(window["steps"] for window in self.comparable)
        if steps == self.steps:
            return self.run.notes
        judged = f"Balance and pace are judged by {steps:,} of {self.steps:,} steps: the others were on other ranks"
        return [*self.run.notes, f"{judged} or devices."]

    @cached_property
    def status(self) -> str:
        """How it ended: completed, interrupted or failed; unfinished where nothing says so."""
        starts = [n for n, record in enumerate(self.run.records) if record["kind"] == "start"]
        ends = [record for record in self.run.records[starts[-1] :] if record["kind"] == "end"]
        return str(ends[-1]["status"]) if ends else "unfinished"

    @property
    def data_parallel_ranks(self) -> int:
        """Distinct streams of batches, in the comparable windows."""
        return int(self._trained["exchange"]["data-parallel ranks"])

    @property
    def steps(self) -> int:
        """Optimizer steps in the windows."""
        return sum(window["steps"] for window in self.windows)

    @property
    def seconds(self) -> float:
        """Training time, without validation, checkpoints and logging."""
        return sum(float(window["seconds"]) for window in self.windows)

    def total(self, name: str) -> int | None:
        """Tokens or samples of the run; None where a window does not tell."""
        values = [window[name] for window in self.windows]
        return sum(values) if values and None not in values else None

    def per_step(self, name: str) -> NDArray[np.float64]:
        """A per-step figure of the comparable windows, (steps,); empty where it is not known."""
        values = [window[name] for window in self.comparable if window[name] is not None]
        return np.concatenate(values).astype(np.float64) if values else np.zeros(0)

    @property
    def in_slots(self) -> bool:
        """Whether ranks wait for each other in every micro-batch, and not only once a step."""
        return bool(self.comparable) and bool(self.comparable[-1].get("in_slots", False))

    @property
    def unevenness(self) -> float:
        """The median CV_step, or what waiting takes where ranks also wait within a step: how balanced a run is."""
        spread = float(np.median(self.per_step("cv_step")))
        return max(spread, self.idle) if self.in_slots else spread

    @cached_property
    def idle(self) -> float:
        """Share of the time of the comparable windows that ranks wait for the slowest."""
        return _ratio(self._seconds("idle_seconds"), self._seconds("seconds"))

    @cached_property
    def even_idle(self) -> float:
        """The same if all ranks were as fast as a healthy one; as it is where the log does not tell."""
        name = "even_idle_seconds"
        idle = [float(window[name if name in window else "idle_seconds"]) for window in self.comparable]
        return _ratio(sum(idle), self._seconds("seconds"))

    @cached_property
    def slow_ranks(self) -> list[SlowRank]:
        """Ranks that are slow by themselves, the slowest first."""
        return slow_ranks(self)

    @cached_property
    def cause(self) -> Cause:
        """What is to blame for most of what ranks wait."""
        return cause_of(self)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks are GPUs."""
        return "memory_gib" in self.start["machine"]

    @property
    def compute_idle(self) -> float:
        """The same as a share of the slowest ranks' work, as a plan predicts it."""
        return _ratio(self._seconds("idle_seconds"), self._seconds("slowest_seconds"))

    def _seconds(self, name: str) -> float:
        """The sum of a field over the comparable windows."""
        return sum(float(window[name]) for window in self.comparable)

    @cached_property
    def kinds(self) -> list[ShapeTimes]:
        """Micro-batches by shape and size."""
        return kinds_of(self.windows)

    @cached_property
    def comparable_kinds(self) -> list[ShapeTimes]:
        """Those of the comparable windows: on other devices or ranks they take other times."""
        return kinds_of(self.comparable)

    @cached_property
    def model(self) -> StepTimeModel | None:
        """The step-time model that the run's own measurements give."""
        return fit(self.comparable_kinds)

    @cached_property
    def planner_error(self) -> float | None:
        """Median relative error of the model that the planner balances by; None without one."""
        if not self.plans or self.plans[-1]["step_time"] is None or not self.comparable_kinds:
            return None
        return error_of(StepTimeModel.from_dict(self.plans[-1]["step_time"]), self.comparable_kinds)

    @cached_property
    def drift(self) -> Drift | None:
        """The fall of the throughput that lasts to the end; None where there is none."""
        return find_drift(self.comparable)

    @cached_property
    def loading(self) -> Loading | None:
        """What the loaders did; None where the log does not tell."""
        return loading_of(self.run)

    @cached_property
    def predicted(self) -> dict[Balance, StepSpreads]:
        """What every balance would do on the same clips; empty where that is unknown."""
        if not self.plans:
            return {}
        return predict_balances(self.comparable, self.plans[-1], self.model, self.in_slots)

    def parts(self) -> dict[str, list[float]]:
        """Seconds of every global rank by part of the step, over the whole run.

        A run may go on with another number of ranks: there are as many as there were at most.
        """
        most = max((len(of_rank) for window in self.windows for of_rank in window["ranks"].values()), default=0)
        parts: dict[str, NDArray[np.float64]] = {}
        for window in self.windows:
            for name, of_rank in window["ranks"].items():
                parts.setdefault(name, np.zeros(most))[: len(of_rank)] += of_rank
        return {name: seconds.tolist() for name, seconds in parts.items()}

    @property
    def device_seconds(self) -> float:
        """Time of the comparable windows, of all ranks together."""
        return sum(float(window["seconds"]) * max(map(len, window["ranks"].values())) for window in self.comparable)

    def share_of(self, name: str) -> float:
        """Share of a part in the steps of all ranks: what lies between steps, such as validation, is left out."""
        parts = self.parts()
        total = sum(sum(seconds) for part, seconds in parts.items() if part != "other")
        return sum(parts[name]) / total if total else 0.0

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the run is balanced, in a sentence."""
        if not self.windows:
            return Verdict("No step was recorded", "plain")
        if self.data_parallel_ranks == 1:
            return Verdict("One data-parallel rank: there is nothing to balance", "plain")
        cost = f"waiting for the slowest rank took {percent(self.idle)} of the time"
        if self.unevenness <= BALANCED:
            return Verdict(f"Balanced: {cost}", "good")
        is_near = self.unevenness <= NEARLY_BALANCED
        return Verdict(f"{self._blame(is_near)}: {cost}", "fair" if is_near else "bad")

    def _blame(self, is_near: bool) -> str:
        """What keeps the run from being balanced."""
        if self.cause == "rank":
            rank, slowdown = self.slow_ranks[0]
            if len(self.slow_ranks) > 1:
                return f"{len(self.slow_ranks)} ranks are slow, rank {rank} takes {slowdown:.2f} times as long"
            return f"Rank {rank} is slow, it takes {slowdown:.2f} times as long"
        if is_near:
            return "Nearly balanced"
        blamed = {"costs": "Costs are predicted wrongly", "chance": "Times vary from step to step"}
        return blamed.get(self.cause, "Not balanced")

    @cached_property
    def advice(self) -> list[Advice]:
        """What to do, the most pressing first; may be empty."""
        return advice_on_run(self)


def _machine_of(start: LoggedRecord) -> tuple[str, int, int]:
    """What the devices are, how many ranks there are, and how many of them are data-parallel."""
    machine = start["machine"]
    return str(machine["device"]), int(machine["ranks"]), int(start["exchange"]["data-parallel ranks"])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
