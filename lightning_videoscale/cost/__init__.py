"""What a micro-batch may hold and what it costs.

- `budget`: `BucketBudget`, M_mem and M_comp and the batch size that they allow (equation 2).
- `measurement`: `Measurement`, one point of a shape benchmark.
- `matrix`: `ShapeMatrix`, all of its points and where they were measured, as a file.
- `step_time`: `StepTimeModel`, fitted to measurements or derived from FLOPs.
- `memory`: `MemoryModel`, from measured peaks to M_mem.
- `calibration`: `Calibration`, costs and budgets under one version.
- `recalibration`: `Recalibration`, which corrects them by what a run observes.
- `observations`: `ObservedCosts`, what a run observes, with the ranks' own speeds taken out.
- `weighted_fit`: the fit to many noisy points.
- `floor`: what is so small that the time to launch it is all that shows.
- `spread`: CV_step and Compute CV, of times and of costs.
- `median`: the median of values that count unequally.
- `geometry`: `ModelGeometry`, how many tokens a model makes of a clip.
- `flops`: `TransformerFlops`, the work of a transformer by its configuration, and `training_flops` of a micro-batch.
"""

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.flops import TRANSFORMERS, TransformerFlops, training_flops
from lightning_videoscale.cost.matrix import MatrixRow, ShapeMatrix
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.cost.observations import Observation
from lightning_videoscale.cost.recalibration import Recalibration
from lightning_videoscale.cost.step_time import StepTimeModel

__all__ = [
    "TRANSFORMERS",
    "BucketBudget",
    "Calibration",
    "MatrixRow",
    "Measurement",
    "MemoryModel",
    "Observation",
    "Recalibration",
    "ShapeMatrix",
    "StepTimeModel",
    "TransformerFlops",
    "training_flops",
]
