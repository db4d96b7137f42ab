"""The table at the end of a run: what was learned, how fast, how evenly, and where the results lie."""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from sample_figure import SampleFigure

from lightning_videoscale.callbacks import LoadBalanceMonitor, RunReport
from lightning_videoscale.topology import topology_of


class RunTable(pl.Callback):
    """Prints the table on rank 0 when `fit` is over.

    Args:
        metric: The logged loss; its first and last values are means over a tenth of the steps.
    """

    def __init__(self, metric: str = "train/loss") -> None:
        self.metric = metric
        self._losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._losses.clear()
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(trainer.callback_metrics[self.metric].detach())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds = time.perf_counter() - self._start
        if self._losses:
            self._losses = list(trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean").cpu())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        console = Console()
        table = Table(title=f"{type(pl_module).__name__} after {trainer.global_step} steps", show_header=False)
        for name, value in {**self._learned(), **self._speed(trainer)}.items():
            table.add_row(name, value)
        console.print(table)
        for name, path in _artefacts(trainer).items():
            console.print(f"{name}: {path}", soft_wrap=True)

    def _learned(self) -> dict[str, str]:
        if not self._losses:
            return {}
        tenth = max(1, len(self._losses) // 10)
        first, last = torch.stack(self._losses[:tenth]).mean(), torch.stack(self._losses[-tenth:]).mean()
        return {
            "loss, mean of the first tenth": f"{first:.3f}",
            "loss, mean of the last tenth": f"{last:.3f}",
            "last / first": f"{last / first:.2f}",
        }

    def _speed(self, trainer: pl.Trainer) -> dict[str, str]:
        topology = topology_of(trainer)
        monitors = [callback for callback in trainer.callbacks if isinstance(callback, LoadBalanceMonitor)]
        figures = monitors[0].summary() if monitors else {}
        formats = {
            "samples": ("samples seen", ",.0f"),
            "tokens_per_second": ("tokens/s", ",.0f"),
            "cv_step": ("CV_step", ".3f"),
            "compute_cv": ("Compute CV", ".3f"),
        }
        return {
            "wall time": f"{self._seconds:.0f} s",
            "batch streams x ranks per sequence": f"{topology.data_parallel_size} x {topology.sequence_parallel_size}",
            **{title: format(figures[key], spec) for key, (title, spec) in formats.items() if key in figures},
        }


def _artefacts(trainer: pl.Trainer) -> dict[str, str]:
    figures = [callback.path for callback in trainer.callbacks if isinstance(callback, SampleFigure)]
    reports = [callback.path for callback in trainer.callbacks if isinstance(callback, RunReport)]
    found = {
        "checkpoint": trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path,
        "TensorBoard": trainer.logger and trainer.logger.log_dir,
        "picture": figures[0] if figures else None,
        "report": reports[0] if reports else None,
    }
    return {name: str(path) for name, path in found.items() if path}
