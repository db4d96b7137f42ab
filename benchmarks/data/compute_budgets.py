"""What a chosen M_comp makes of a plan, simulated on a mix of real clips' shapes, with one micro-batch a step.

    videoscale plan --best-m-comp --help                   # the same on your own clips
    python benchmarks/data/compute_budgets.py clips.csv    # columns source, width, height, fps, num_frames

M_comp is chosen on a sample of the first epoch, as `budget="auto"` does, and judged on the next two, beside what the
longest clip alone costs. Costs are those of Wan-14B by its FLOPs, and of Wan-1.3B's blocks as `data/balances.py` has
measured them on two H200s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, StepTimeModel
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import BucketPlanner, SampleTable
from lightning_videoscale.data.planning.compute_budget import best_of, try_budgets
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, standard_mix

LONGEST = 75_600
MEASURED = "data/balances-h200x2.json"
SAMPLES = 60_000
EPOCHS = (1, 2)


def models() -> dict[str, StepTimeModel]:
    """Step-time models by name."""
    measured = json.loads((Path(__file__).parents[1] / "results" / MEASURED).read_text())
    return {
        "wan2.1-14b, FLOPs": StepTimeModel.analytic(TRANSFORMERS["wan2.1-14b"], longest=LONGEST),
        "wan2.1-1.3b, measured": StepTimeModel.from_dict(measured["settings"]["cost"]),
    }


def over_epochs(planner: BucketPlanner) -> dict[str, float]:
    """Means of the figures that matter here."""
    epochs = [PlanFigures.of(planner.plan(epoch)).to_dict() for epoch in EPOCHS]
    names = ("efficiency", "cv_step", "cost_cv", "diversity", "delay_p99", "steps", "tokens_per_cost")
    return {name: round(float(np.mean([figures[name] for figures in epochs])), 4) for name in names}


def row_of(model: str, m_mem: int, planner: BucketPlanner) -> dict[str, Any]:
    """Chooses, and compares."""
    started = time.process_time()
    best = best_of(try_budgets(planner))
    seconds = time.process_time() - started
    before, after = over_epochs(planner), over_epochs(replace(planner, budget=best.budget))
    return {
        "costs": model,
        "m_mem": m_mem,
        "dp_size": planner.dp_size,
        "m_comp": best.factor,
        "gain": round(after["tokens_per_cost"] / before["tokens_per_cost"] - 1, 4),
        "before": before,
        "after": after,
        "choice_s": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path)
    file = parser.parse_args().shapes
    clips = Clips.from_csv(file)
    commit = provenance.commit()
    table = SampleTable.of_clips(standard_mix(clips, SAMPLES), STANDARD_POLICY, GEOMETRIES["wan2.1"])
    rows = []
    for model, step_time in models().items():
        for m_mem in (2, 4):
            for dp_size in (4, 8, 16, 32, 64):
                p = step_time.power_law.p
                alone = BucketBudget(m_mem * LONGEST, float(LONGEST) ** p, p)
                rows.append(row_of(model, m_mem, BucketPlanner(table, alone, dp_size=dp_size, step_time=step_time)))
                print(rows[-1], flush=True)
    settings = {"samples": SAMPLES, "longest": LONGEST, "m_mem": "multiples of the longest", "epochs": EPOCHS}
    settings |= {"micro_batches": 1, "clips": len(clips), "measured": MEASURED}
    settings["table"] = provenance.table(file)
    provenance.write(provenance.path("data", "compute_budgets"), "data/compute_budgets", commit, settings, rows)


if __name__ == "__main__":
    main()
