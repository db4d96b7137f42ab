"""The loop from observed times to budgets, simulated: how fast it finds the true costs, and whether it stays there.

    python benchmarks/callbacks/recalibration.py clips.csv    # columns source, width, height, fps, num_frames

The planner and the recalibration are the package's own, and the clips are those of the table. The clock is replayed or
simulated: what an H200 was measured to take with the noise of each shape (`replayed_costs`), or a power law with noise;
one rank is slower than the others, and there is a hiccup now and then. The first costs are wrong by a factor of 2 and
their p by 0.3. An oracle knows the true costs from the start. `recalibration_on_gpus.py` is the same with a Trainer and
real times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.callbacks.replayed_costs import MEASURED, ReplayedCosts
from lightning_videoscale.cost import BucketBudget, StepTimeModel
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.points import Points
from lightning_videoscale.cost.recalibration import Recalibration
from lightning_videoscale.cost.step_time import AdditiveCost, PowerLaw
from lightning_videoscale.cost.time_budget import TimeBudget
from lightning_videoscale.cost.weighted_fit import fit_step_time
from lightning_videoscale.data.planning import BucketPlanner, EpochPlan, SampleTable
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, standard_mix

LONGEST = 75_600
READ_AHEAD = 2  # steps that are read before they are trained: a new plan begins after them


@dataclass(frozen=True)
class World:
    """What is simulated.

    Args:
        truth: The costs that the oracle plans by, and the clock goes by unless it is replayed.
        table: The samples.
        dp_size: Ranks.
        micro_batches: Micro-batches per step and rank.
        clock: What micro-batches take, and its noise. None: what ``truth`` says, with ``noise``.
        noise: Standard deviation of the logarithm of a micro-batch's time.
        slow_rank: Who is slower.
        slowness: By what factor.
        hiccups: Share of micro-batches that take three times as long.
        target_sync: Seconds that a micro-batch may take. None: M_comp, room for one of the longest samples.
        seed: Of the noise and of the plans.
    """

    truth: StepTimeModel
    table: SampleTable
    dp_size: int = 16
    micro_batches: int = 4
    clock: ReplayedCosts | None = None
    noise: float = 0.03
    slow_rank: int = 3
    slowness: float = 1.3
    hiccups: float = 0.002
    target_sync: float | None = 1.0
    seed: int = 0

    def calibration(self, step_time: StepTimeModel) -> Calibration:
        """Budgets by a model of the costs."""
        if self.target_sync is not None:
            return Calibration(TimeBudget(2.0 * LONGEST, self.target_sync, step_time), step_time)
        p = step_time.power_law.p
        return Calibration(BucketBudget(2.0 * LONGEST, LONGEST**p, p), step_time)

    def planner(self, calibration: Calibration) -> BucketPlanner:
        """Plans by a calibration."""
        return BucketPlanner(
            self.table,
            calibration.budget,
            dp_size=self.dp_size,
            micro_batches=self.micro_batches,
            step_time=calibration.step_time,
            seed=self.seed,
        )

    def true_costs(self, plan: EpochPlan, step: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(ranks, K, 2) B and S, and (ranks, K) true seconds of one step."""
        numbers = plan.grid[step]
        shapes = np.stack([np.diff(plan.starts)[numbers], plan.table.sequence_lengths[plan.shape_id[numbers]]], axis=-1)
        costs = self.truth if self.clock is None else self.clock
        return shapes.astype(np.float64), costs.predict(shapes[..., 0], shapes[..., 1])

    def disturbed(self, shapes: NDArray[np.float64], draws: np.random.Generator) -> NDArray[np.float64]:
        """(ranks, K) factors of single times."""
        if self.clock is not None:
            return self.clock.noise(shapes[..., 0], shapes[..., 1], draws)
        return np.exp(self.noise * draws.standard_normal(shapes.shape[:-1]))


def power_law(a: float, b: float, p: float) -> StepTimeModel:
    """A model that is a power law and nothing else."""
    return StepTimeModel(PowerLaw(a, b, p, 1.0), AdditiveCost(a, 0.0, b), 0.0, 1.0)


def world_of(clips: Clips, samples: int, p: float, **settings: Any) -> World:
    """The standard mix, on a GPU that takes a second for its longest sample."""
    table = SampleTable.of_clips(standard_mix(clips, samples), STANDARD_POLICY, GEOMETRIES["wan2.1"], 0)
    return World(power_law(0.02, 0.98 / LONGEST**p, p), table, **settings)


def replayed_world(clips: Clips, samples: int, has_target: bool, **settings: Any) -> World:
    """The standard mix on the H200 that was measured; with a target, as long as its longest sample takes."""
    table = SampleTable.of_clips(standard_mix(clips, samples), STANDARD_POLICY, GEOMETRIES["wan2.1"], 0)
    clock = ReplayedCosts.load()
    target = float(clock.predict(1, LONGEST)) if has_target else None
    world = World(clock.fit, table, clock=clock, target_sync=target, **settings)
    for _ in range(2):  # other costs make other batch sizes
        world = replace(world, truth=_fit_to_plan(world, clock))
    return world


def _fit_to_plan(world: World, clock: ReplayedCosts) -> StepTimeModel:
    """What an oracle fits: the undisturbed times of all micro-batches of an epoch."""
    plan = world.planner(world.calibration(world.truth)).plan(0)
    micro_batches = np.stack([np.diff(plan.starts), plan.table.sequence_lengths[plan.shape_id]], axis=1)
    shapes, counts = np.unique(micro_batches.astype(np.float64), axis=0, return_counts=True)
    samples, lengths = shapes.T
    return fit_step_time(Points(samples, lengths, clock.predict(samples, lengths), counts.astype(np.float64)))


def wrong(truth: StepTimeModel, factor: float, p_error: float) -> StepTimeModel:
    """Costs wrong by a factor for the longest sample, and p by a difference."""
    law = truth.power_law
    p = law.p + p_error
    return power_law(law.a * factor, law.b * factor * LONGEST ** (law.p - p), p)


class Walk:
    """Steps through plans, which may be replaced behind what is read already."""

    def __init__(self, world: World, calibration: Calibration) -> None:
        self.world = world
        self.calibration = calibration
        self._epoch = 0
        self._plan, self._step = world.planner(calibration).plan(0), 0
        self._next: tuple[int, EpochPlan] | None = None

    def adopt(self, calibration: Calibration) -> None:
        """Plans anew what is not read yet."""
        self.calibration = calibration
        boundary = self._step + READ_AHEAD
        if boundary < self._plan.steps:
            done = self._plan.done_after(boundary)
            self._next = boundary, self.world.planner(calibration).plan(self._epoch, done)

    def steps(self) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """B and S, and true seconds, step by step without end."""
        while True:
            if self._next is not None and self._step == self._next[0]:
                (_, self._plan), self._step, self._next = self._next, 0, None
            if self._step == self._plan.steps:
                self._epoch += 1
                self._plan, self._step = self.world.planner(self.calibration).plan(self._epoch), 0
            step, self._step = self._step, self._step + 1
            yield self.world.true_costs(self._plan, step)


def observe(world: World, shapes: NDArray[np.float64], seconds: NDArray[np.float64], step: int) -> list[Measurement]:
    """What the clock says of a step."""
    draws = np.random.default_rng([world.seed, step])
    factor = world.disturbed(shapes, draws)
    factor *= np.where(draws.random(seconds.shape) < world.hiccups, 3.0, 1.0)
    factor[world.slow_rank] *= world.slowness
    ranks = np.broadcast_to(np.arange(world.dp_size)[:, None], seconds.shape)
    rows = np.stack([ranks, shapes[..., 0], shapes[..., 1], seconds * factor], axis=-1).reshape(-1, 4)
    return [Measurement(int(b), int(s), time, dp_rank=int(rank)) for rank, b, s, time in rows.tolist()]


def spread(seconds: NDArray[np.float64]) -> float:
    """std / mean over the ranks of a step's seconds."""
    of_rank = seconds.sum(axis=1)
    return float(of_rank.std() / of_rank.mean())


def simulate(
    world: World, first: StepTimeModel, steps: int, every: int = 20, stop: int | None = None
) -> dict[str, Any]:
    """Runs the loop beside the oracle.

    Args:
        world: What is simulated.
        first: The costs at the start.
        steps: Optimizer steps.
        every: Steps from window to window.
        stop: A step, a multiple of ``every``, at which the loop goes through JSON, as through a checkpoint.

    Returns:
        Per step how many of the longest samples the budget has room for, p, CV and the oracle's CV; its room and
        p; what changed when and why.
    """
    loop, oracle = Walk(world, world.calibration(first)), Walk(world, world.calibration(world.truth))
    recalibration = Recalibration(loop.calibration, world.target_sync, LONGEST)
    window: list[Measurement] = []
    track: dict[str, list[float]] = {"room": [], "p": [], "cv": [], "oracle_cv": []}
    changes: list[dict[str, Any]] = []
    for step, (shapes, seconds), (_, best) in zip(range(1, steps + 1), loop.steps(), oracle.steps(), strict=False):
        window += observe(world, shapes, seconds, step)
        budget = loop.calibration.budget
        for name, value in zip(track, (budget.room(LONGEST), budget.p, spread(seconds), spread(best)), strict=True):
            track[name].append(value)
        if step % every == 0:
            outcome = recalibration.update(window)
            window = []
            if outcome.changed:
                loop.adopt(outcome.calibration)
                changes.append({"step": step, "version": outcome.calibration.version, "reason": outcome.reason})
        if step == stop:
            state = json.loads(json.dumps(recalibration.state_dict()))
            recalibration = Recalibration(world.calibration(first), world.target_sync, LONGEST)
            recalibration.load_state_dict(state)
    right = oracle.calibration.budget
    return {
        "oracle_room": right.room(LONGEST),
        "oracle_p": right.p,
        "changes": changes,
        "speeds": recalibration.speeds,
        "state": hashlib.sha256(json.dumps(recalibration.state_dict(), sort_keys=True).encode()).hexdigest(),
        **track,
    }


CASES = [
    {"costs": "power law", "dp_size": 16, "micro_batches": 4, "p": 1.9, "factor": 2.0, "p_error": 0.3},
    {"costs": "power law", "dp_size": 16, "micro_batches": 1, "p": 1.9, "factor": 0.5, "p_error": -0.3},
    {"costs": "power law", "dp_size": 4, "micro_batches": 4, "p": 2.0, "factor": 0.5, "p_error": 0.3},
    {"costs": "power law", "dp_size": 4, "micro_batches": 1, "p": 2.0, "factor": 2.0, "p_error": -0.3},
    *(
        {
            "costs": "measured",
            "budget": budget,
            "dp_size": ranks,
            "micro_batches": k,
            "factor": factor,
            "p_error": error,
        }
        for budget in ("target_sync", "m_comp")
        for ranks, k, factor, error in (
            (16, 4, 2.0, 0.3),
            (16, 1, 2.0, 0.3),
            (4, 4, 2.0, 0.3),
            (4, 1, 2.0, 0.3),
            (16, 4, 0.5, -0.3),
        )
    ),
]
SEEDS = 6  # of what is said of step 100: the CV of twenty steps varies
SETTINGS = {"steps": 2000, "every_n_steps": 20, "samples": 40_000, "noise": 0.03, "hiccups": 0.002, "slowness": 1.3}


def world_of_case(clips: Clips, case: dict[str, Any]) -> World:
    """The clips and the clock of a case."""
    settings = {name: case[name] for name in ("dp_size", "micro_batches")}
    settings |= {name: SETTINGS[name] for name in ("noise", "hiccups", "slowness")}
    if case["costs"] == "measured":
        return replayed_world(clips, SETTINGS["samples"], case["budget"] == "target_sync", **settings)
    return world_of(clips, SETTINGS["samples"], case["p"], **settings)


def by_100(world: World, first: StepTimeModel, every: int) -> float:
    """The CV over the oracle's in the window that ends at step 100, the means over some seeds."""
    results = [simulate(replace(world, seed=seed), first, 100, every) for seed in range(SEEDS)]
    cv, oracle_cv = (np.mean([result[name][-every:] for result in results]) for name in ("cv", "oracle_cv"))
    return float(cv / oracle_cv)


def row(case: dict[str, Any], result: dict[str, Any], every: int) -> dict[str, Any]:
    """A case's figures; curves by windows of steps."""
    windows = {name: np.array(result[name]).reshape(-1, every) for name in ("room", "p", "cv", "oracle_cv")}
    error = windows["room"][:, -1] / result["oracle_room"] - 1
    after = 200 // every
    return {
        "p": result["oracle_p"],
        **case,
        "steps": [every * (n + 1) for n in range(len(error))],
        "room_over_oracle": (1 + error).round(4).tolist(),
        "p_by_step": windows["p"][:, -1].round(4).tolist(),
        "cv": windows["cv"].mean(axis=1).round(5).tolist(),
        "oracle_cv": windows["oracle_cv"].mean(axis=1).round(5).tolist(),
        "largest_room_error_from_200": round(float(np.abs(error[after - 1 :]).max()), 4),
        "cv_over_oracle_from_200": round(float(windows["cv"][after:].mean() / windows["oracle_cv"][after:].mean()), 3),
        "changes_from_200": sum(change["step"] > 200 for change in result["changes"]),
        "changes": result["changes"],
        "speed_of_slow_rank": round(result["speeds"][World.slow_rank], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path)
    clips = Clips.from_csv(parser.parse_args().shapes)
    commit = provenance.commit()
    rows = []
    for case in CASES:
        world = world_of_case(clips, case)
        first = wrong(world.truth, case["factor"], case["p_error"])
        result = simulate(world, first, SETTINGS["steps"], SETTINGS["every_n_steps"])
        rows.append(row(case, result, SETTINGS["every_n_steps"]))
        rows[-1]["cv_over_oracle_by_100"] = round(by_100(world, first, SETTINGS["every_n_steps"]), 3)
        print({name: value for name, value in rows[-1].items() if not isinstance(value, list)})
    sources = len(np.unique(clips.source))
    settings = {**SETTINGS, "clips": len(clips), "sources": sources, "slow_rank": World.slow_rank}
    settings |= {"measured": MEASURED.name, "seeds_of_step_100": SEEDS}
    provenance.write(provenance.path("callbacks", "recalibration"), "callbacks/recalibration", commit, settings, rows)


if __name__ == "__main__":
    main()
