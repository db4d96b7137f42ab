"""How well the ranks are balanced and used, as `torchmetrics` metrics that also work alone.

- `step_time_spread`: `StepTimeSpread`, CV_step = (max - min) / max of what the ranks need for one step, or of their
  sequence lengths.
- `compute_cv`: `ComputeCV`, std / mean of the load B * S**p over the data-parallel ranks.
- `physical_load`: `PhysicalLoad`, mean and maximum of B * S**2.
- `throughput_efficiency`: `ThroughputEfficiency`, latent tokens per second of a rank (Θ).
- `model_flops_utilization`: `ModelFlopsUtilization`, the model's FLOPs over what the device could do.
- `ratio`: `Ratio`, the base of all of them.
- `padding_share`: `PaddingShare`, the share of tokens that are worked on for nothing.
"""

from lightning_videoscale.metrics.compute_cv import ComputeCV
from lightning_videoscale.metrics.model_flops_utilization import ModelFlopsUtilization
from lightning_videoscale.metrics.padding_share import PaddingShare
from lightning_videoscale.metrics.physical_load import PhysicalLoad
from lightning_videoscale.metrics.step_time_spread import StepTimeSpread
from lightning_videoscale.metrics.throughput_efficiency import ThroughputEfficiency

__all__ = [
    "ComputeCV",
    "ModelFlopsUtilization",
    "PaddingShare",
    "PhysicalLoad",
    "StepTimeSpread",
    "ThroughputEfficiency",
]
