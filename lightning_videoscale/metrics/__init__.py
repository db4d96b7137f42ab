"""How well the ranks are balanced, as `torchmetrics` metrics that also work alone.

- `step_time_spread`: `StepTimeSpread`, CV_step = (max - min) / max of what the ranks need for one step.
- `compute_cv`: `ComputeCV`, std / mean of the load B * S**p over the data-parallel ranks.
"""

from lightning_videoscale.metrics.compute_cv import ComputeCV
from lightning_videoscale.metrics.step_time_spread import StepTimeSpread

__all__ = ["ComputeCV", "StepTimeSpread"]
