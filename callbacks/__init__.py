"""Lightning callbacks: what is watched, weighed and injected while a Trainer runs. One callback per file.

- `fused_kernels`: `FusedKernels`, injects fused kernels into the model.
- `load_balance_monitor`: `LoadBalanceMonitor`, logs CV_step, Compute CV and throughput, and sums them up for the run.
- `loss_weighting`: `LossWeighting`, applies `meta.loss_weight` under strategies that do not.
- `memory_monitor`: `MemoryMonitor`, logs how full the GPUs are and how many more tokens would fit.
- `run_report`: `RunReport`, keeps a log of the run and draws a page from it.
- `forward_clock`: the clock behind `LoadBalanceMonitor`.
- `device_memory`: the gauge behind `MemoryMonitor`.
- `batch_load`: what the callbacks read from a batch's `meta`.
"""

from lightning_videoscale.callbacks.fused_kernels import FusedKernels
from lightning_videoscale.callbacks.load_balance_monitor import LoadBalanceMonitor
from lightning_videoscale.callbacks.loss_weighting import LossWeighting
from lightning_videoscale.callbacks.memory_monitor import MemoryMonitor
from lightning_videoscale.callbacks.run_report import RunReport

__all__ = ["FusedKernels", "LoadBalanceMonitor", "LossWeighting", "MemoryMonitor", "RunReport"]
