"""What the three balances do to the ranks' loads, simulated on a mix of real clips' shapes, and what planning costs.

    videoscale plan --help                      # the same on your own clips
    python benchmarks/data/plan.py clips.csv    # columns source, width, height, fps, num_frames

Costs are those of Wan-14B by its FLOPs. Clips are drawn as `standard_mix` says, and every draw is trained on once.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, StepTimeModel
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import Balance, BucketPlanner, SampleTable
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, standard_mix

LONGEST = 75_600
SETTINGS = {
    "model": "wan2.1-14b",
    "m_mem": 2 * LONGEST,
    "m_comp": "one sample of 75 600 tokens",
    "samples": 200_000,
    "seeds": [0, 1, 2],
}


def figures(clips: Clips, samples: int, seed: int, **planner: Any) -> dict[str, Any]:
    """Plans one epoch; the seconds are CPU time."""
    mix = standard_mix(clips, samples, seed)
    table = SampleTable.of_clips(mix, STANDARD_POLICY, GEOMETRIES["wan2.1"], seed)
    step_time = StepTimeModel.analytic(TRANSFORMERS["wan2.1-14b"], longest=LONGEST)
    p = step_time.power_law.p
    budget = BucketBudget(2 * LONGEST, LONGEST**p, p)
    started = time.process_time()
    plan = BucketPlanner(table, budget, step_time=step_time, seed=seed, **planner).plan(epoch=0)
    seconds = time.process_time() - started
    found = {name: round(value, 4) for name, value in PlanFigures.of(plan).to_dict().items()}
    return {**planner, "seed": seed, "p": p, **found, "plan_s": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path)
    file = parser.parse_args().shapes
    clips = Clips.from_csv(file)
    commit = provenance.commit()
    rows = []
    for micro_batches in (1, 2, 4, 8):
        for balance in get_args(Balance)[::-1]:
            for seed in SETTINGS["seeds"]:
                setting = {"balance": balance, "dp_size": 16, "micro_batches": micro_batches}
                rows.append(figures(clips, SETTINGS["samples"], seed, **setting))
                print(rows[-1])
    for micro_batches, diverse in ((1, {}), (1, {"min_diversity": 0.8}), (4, {})):
        setting: dict[str, Any] = {"balance": "planned", "dp_size": 1024, "micro_batches": micro_batches, **diverse}
        rows.append(figures(clips, 1_000_000, 0, **setting))
        rows[-1]["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(rows[-1])
    settings = {**SETTINGS, "clips": len(clips), "table": provenance.table(file)}
    provenance.write(provenance.path("data", "plan"), "data/plan", commit, settings, rows)


if __name__ == "__main__":
    main()
