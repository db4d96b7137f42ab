"""Lightning callbacks: what is watched, weighed and injected while a Trainer runs. One callback per file.

- `bottleneck_analyzer`: `BottleneckAnalyzer`, names what costs the most, and what to try.
- `budget_recalibrator`: `BudgetRecalibrator`, corrects costs and budgets by what the ranks really take.
- `ema`: `EMA`, averages of the weights under every strategy.
- `fused_kernels`: `FusedKernels`, injects fused kernels into the model.
- `load_balance_monitor`: `LoadBalanceMonitor`, logs CV_step, Compute CV and throughput, and sums them up for the run.
- `memory_monitor`: `MemoryMonitor`, logs how full the GPUs are and how many more tokens would fit.
- `run_report`: `RunReport`, keeps a log of the run and draws a page from it.
- `sample_videos`: `SampleVideos`, samples with the network in training; `sampling_state` keeps the training as it was,
  `sample_files` writes the videos.
- `balance_metrics`, `balance_pictures`: the figures and pictures behind `LoadBalanceMonitor`.
- `run_figures`: which run figures are of, where callbacks are restored or serve another fit.
- `best_effort`: keeps what a callback does on the side from stopping the training.
- `loader_watch`, `step_losses`: what the loaders do and the losses, for `RunReport`.
- `out_of_memory`: what a restart learns of a micro-batch that did not fit.
- `device_memory`: the gauge that `MemoryMonitor` and `BudgetRecalibrator` read.

What the ranks did comes to all of them from the one step log of the Trainer, `lightning_videoscale.timing`.

`LossWeighting`, which applies `meta.loss_weight` under strategies that do not, is in `data/loading/loss_weighting`:
`VideoDataModule` adds it where it is needed.
"""

from lightning_videoscale.callbacks.bottleneck_analyzer import BottleneckAnalyzer
from lightning_videoscale.callbacks.budget_recalibrator import BudgetRecalibrator
from lightning_videoscale.callbacks.ema import EMA
from lightning_videoscale.callbacks.fused_kernels import FusedKernels
from lightning_videoscale.callbacks.load_balance_monitor import LoadBalanceMonitor
from lightning_videoscale.callbacks.memory_monitor import MemoryMonitor
from lightning_videoscale.callbacks.run_report import RunReport
from lightning_videoscale.callbacks.sample_videos import SampleVideos
from lightning_videoscale.data.loading.loss_weighting import LossWeighting

__all__ = [
    "EMA",
    "BottleneckAnalyzer",
    "BudgetRecalibrator",
    "FusedKernels",
    "LoadBalanceMonitor",
    "LossWeighting",
    "MemoryMonitor",
    "RunReport",
    "SampleVideos",
]
