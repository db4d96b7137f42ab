"""What a micro-batch may hold and what it costs: all that measures and decides costs and budgets.

The way of a budget, from the argument of `VideoDataModule` to the plan:

    budget= ──┬── BucketBudget, TimeBudget ─────────────────────────────────────┐
              │                                                                 │
              └── "auto", AutoBudget ── ShapeMatrix ──┬─ MemoryModel ── M_mem ──┤
                                   (a file, or        │                         ├── Calibration ── BucketPlanner
                                    measured now by   ├─ StepTimeModel: costs ──┤   (one version)    (data/planning)
                                    `benchmark/`)     │                         │        ▲
                                  TransformerFlops ───┘   plans under some M_comp ┘      │
                                  (nothing measured)      (data/planning/compute_budget) │
                                                                                         │
    all ranks' step times ── list[Measurement] ── Recalibration ── a Calibration ────────┘
    (timing/)                                     (callbacks/budget_recalibrator)

`RunBudget` (data/loading) keeps what counts now and what the checkpoint holds of it. This room imports no other: data,
Trainers and plans are handed in. Only `benchmark/` knows Lightning.

- `budget`: `BucketBudget`, M_mem and M_comp and the batch size that they allow (equation 2).
- `time_budget`: `TimeBudget`, M_mem and the seconds that a micro-batch may take.
- `measurement`: `Measurement`, a point of a shape benchmark or a micro-batch of a run.
- `matrix`: `ShapeMatrix`, all of its points and where they were measured, as a file.
- `step_time`: `StepTimeModel`, fitted to measurements or derived from FLOPs.
- `memory`: `MemoryModel`, from measured peaks to M_mem.
- `calibration`: `Calibration`, costs and budgets under one version.
- `auto_budget`: `AutoBudget`, which finds them.
- `recalibration`: `Recalibration`, which corrects them by what a run observes.
- `observations`: `ObservedCosts`, what a run measures, with the ranks' own speeds taken out.
- `weighted_fit`: the fit to many noisy points.
- `prior`: what observations leave open, taken from what held before.
- `launch_bound`: what is so small that the time to launch it is all that shows.
- `spread`: CV_step and Compute CV, of times and of costs.
- `points`: measured points, and what all fits to them share.
- `geometry`: `ModelGeometry`, how many tokens a model makes of a clip.
- `flops`: `TransformerFlops`, the work of a transformer by its configuration, and `training_flops` of a micro-batch.
"""

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.flops import TRANSFORMERS, TransformerFlops, training_flops
from lightning_videoscale.cost.matrix import MatrixRow, ShapeMatrix
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.memory import MemoryLine, MemoryModel
from lightning_videoscale.cost.recalibration import Recalibration
from lightning_videoscale.cost.step_time import StepTimeModel
from lightning_videoscale.cost.time_budget import TimeBudget

__all__ = [
    "TRANSFORMERS",
    "BucketBudget",
    "Calibration",
    "MatrixRow",
    "Measurement",
    "MemoryLine",
    "MemoryModel",
    "Recalibration",
    "ShapeMatrix",
    "StepTimeModel",
    "TimeBudget",
    "TransformerFlops",
    "training_flops",
]
