"""What a micro-batch may hold and what it costs.

- `budget`: `BucketBudget`, M_mem and M_comp and the batch size that they allow (equation 2).
- `measurement`: `Measurement`, one point of a shape benchmark.
- `step_time`: `StepTimeModel`, fitted to measurements or derived from FLOPs.
- `memory`: `MemoryModel`, from measured peaks to M_mem.
- `flops`: `TransformerFlops`, the work of a transformer by its configuration.
"""

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.flops import TRANSFORMERS, TransformerFlops
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.cost.step_time import StepTimeModel

__all__ = ["TRANSFORMERS", "BucketBudget", "Measurement", "MemoryModel", "StepTimeModel", "TransformerFlops"]
