"""Keeps the log of a run, and draws the report from it when `fit` is over."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_videoscale.callbacks.best_effort import BestEffort
from lightning_videoscale.callbacks.fused_kernels import FusedKernels
from lightning_videoscale.callbacks.loader_watch import LoaderWatch, named
from lightning_videoscale.callbacks.run_folder import named_folder, run_folder
from lightning_videoscale.callbacks.step_losses import StepLosses
from lightning_videoscale.data import BucketPlanner, VideoDataModule
from lightning_videoscale.report import RunLog, record, write_report
from lightning_videoscale.report.records import (
    mean_loss,
    plan_record,
    samples_record,
    schedules_of,
    start_record,
    window_record,
)
from lightning_videoscale.timing import StepWindow, check_interval, subscribe_to_steps
from lightning_videoscale.topology import RunsByGraphs

_VALIDATION = frozenset(("val", "valid", "validation", "validate", "eval", "evaluation"))

_LOSSES = 2
"""Numbers of the losses before those of the loader."""


class RunReport(pl.Callback):
    """Writes one HTML file about the run: is it balanced, how fast was it, what did it cost, what should be done.

    While it trains, rank 0 appends to ``run_log.jsonl`` what all ranks measured, every few optimizer steps, and what
    other callbacks hand in (`lightning_videoscale.report.record`): `LoadBalanceMonitor` need not be there, while
    `MemoryMonitor`, `FusedKernels`, `BudgetRecalibrator` and `BottleneckAnalyzer` each fill a section. When `fit` ends,
    also by an exception, ``report.html`` is drawn from the log and lies beside it; after a kill,
    ``videoscale report FOLDER`` draws it. The page needs no network and no program but a browser. Under
    ``fast_dev_run`` nothing is written, as Lightning logs nothing there.

    The steps are those of the Trainer's one log (`timing.subscribe_to_steps`). Nothing that goes wrong in recording or
    drawing stops the training: it is said once.

    Attributes:
        run_log: The log; None on other ranks than 0, before the Trainer's setup, and under ``fast_dev_run``.
        path: The report, once it is drawn.
    """

    def __init__(self, folder: str | Path | None = None, every_n_steps: int | None = None) -> None:
        """Creates the callback.

        Args:
            folder: Where log and report lie; None: the folder of the run, see `run_folder`.
            every_n_steps: Optimizer steps from record to record; None takes the Trainer's ``log_every_n_steps``.

        Raises:
            ValueError: ``every_n_steps`` is below 1, or ``folder`` a URL.
        """
        self.folder = named_folder(folder)
        self.every_n_steps = check_interval(every_n_steps)
        self.run_log: RunLog | None = None
        self.path: Path | None = None
        self._is_due = False  # from the beginning of a training until its report is drawn
        self._planner: BucketPlanner | None = None
        self._plan: dict[str, Any] | None = None
        self._schedules: dict[str, str] = {}
        self._losses = StepLosses()
        self._best_effort = BestEffort("RunReport")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the folder; from here on callbacks may record."""
        self._is_due = False
        if stage != "fit":
            return
        folder = self.folder or run_folder(trainer)
        is_dry = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set by a connector
        self.run_log = RunLog(folder) if trainer.is_global_zero and not is_dry else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records what the run is, and subscribes to the steps."""
        self._is_due = True
        self._planner, self._plan, self._schedules = None, None, {}
        self._losses, self._loaders = StepLosses(), LoaderWatch(trainer, _data_of(trainer))
        receive = partial(self._record_window, trainer)
        subscribe = partial(subscribe_to_steps, add=self._take)
        self._best_effort.attempt("watch the steps", subscribe, trainer, self.every_n_steps, receive)
        if trainer.is_global_zero:
            self._best_effort.attempt("describe the run", _record_start, trainer, pl_module)
            self._best_effort.attempt("describe the samples", _record_samples, trainer)
            self._best_effort.attempt("describe the injection", _record_injection, trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Records the plan where it is new."""
        if trainer.is_global_zero:
            self._best_effort.attempt("describe the plan", self._record_plan, trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the step's loss."""
        accumulated = trainer.accumulate_grad_batches
        self._best_effort.attempt("keep the loss", self._losses.add, outputs, batch, accumulated)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records the losses that the module logged in the validation."""
        metrics = trainer.callback_metrics  # collective: a metric is averaged over the ranks when it is first read
        losses = {name: float(value) for name, value in metrics.items() if _is_validation_loss(name)}
        if losses and self._is_due and trainer.is_global_zero:
            record(trainer, "val_loss", {"losses": losses})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the report, if there was a training."""
        self._finish(trainer, {"status": "completed"})

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Draws what there is to draw; the steps since the last record are lost, as no collective is possible."""
        stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        self._finish(trainer, {"status": "interrupted" if stopped else "failed", "error": repr(exception)[:2000]})

    def _record_plan(self, trainer: pl.Trainer) -> None:
        planner = getattr(getattr(trainer, "datamodule", None), "planner", None)
        if not isinstance(planner, BucketPlanner) or planner is self._planner:
            return
        self._planner = planner
        plan = plan_record(planner)
        if plan != self._plan:  # every epoch may have a planner of its own that plans as the one before
            self._plan = plan
            record(trainer, "plan", {"epoch": trainer.current_epoch, **plan})

    def _take(self) -> list[float]:
        """As many numbers on every rank, whatever fails."""
        losses = self._best_effort.attempt("read the losses", self._losses.take) or (0.0, 0.0)
        loaders = self._best_effort.attempt("read the loader's figures", self._loaders.take)
        return [*losses, *(self._loaders.nothing if loaders is None else loaders)]

    def _record_window(self, trainer: pl.Trainer, window: StepWindow) -> None:
        if trainer.is_global_zero:
            self._best_effort.attempt("record", _record_steps, trainer, window)
            self._best_effort.attempt("record the CUDA graphs", _record_graphs, trainer)
            self._best_effort.attempt("record the loading", _record_loading, trainer, self._loaders, window)
            self._best_effort.attempt("describe the schedules", self._record_schedules, trainer)

    def _record_schedules(self, trainer: pl.Trainer) -> None:
        schedules = schedules_of(trainer)
        if schedules != self._schedules:
            self._schedules = schedules
            record(trainer, "schedules", {"chosen": schedules})

    def _finish(self, trainer: pl.Trainer, end: dict[str, str]) -> None:
        is_due, self._is_due = self._is_due, False
        if self.run_log is None or not is_due:
            return  # `fit` ended before training, or it is over
        record(trainer, "end", end)
        self.path = self._best_effort.attempt("draw the report", write_report, self.run_log.folder)
        if self.path is not None:
            rank_zero_info(f"Report of the run: {self.path}")


def _is_validation_loss(name: str) -> bool:
    """By the names in use: val/loss, valLoss, validation/flow_loss. Others are interval_loss and value_loss."""
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
    return not words.isdisjoint(_VALIDATION) and "loss" in name.lower()


def _record_steps(trainer: pl.Trainer, window: StepWindow) -> None:
    loss = mean_loss(window)
    finite = None if loss is None else math.isfinite(loss)  # what is not finite is null in the log, as is what is not
    record(trainer, "window", {**window_record(window), "loss": loss, "loss_is_finite": finite})


def _record_loading(trainer: pl.Trainer, loaders: LoaderWatch, window: StepWindow) -> None:
    fields, data = loaders.fields_of(window, first=_LOSSES), _data_of(trainer)
    if fields and data is not None:
        record(trainer, "loading", fields | {"left_out": [named(each, data) for each in fields["left_out"]]})


def _record_graphs(trainer: pl.Trainer) -> None:
    strategy = trainer.strategy
    if isinstance(strategy, RunsByGraphs) and (counts := strategy.describe_graphs()):
        record(trainer, "graphs", counts)


def _record_samples(trainer: pl.Trainer) -> None:
    if (data := _data_of(trainer)) is not None:
        record(trainer, "samples", samples_record(data))


def _data_of(trainer: pl.Trainer) -> VideoDataModule | None:
    """The data whose loading is watched."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, VideoDataModule) and data.planner is not None else None


def _record_start(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    record(trainer, "start", start_record(trainer, pl_module))


def _record_injection(trainer: pl.Trainer) -> None:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, FusedKernels) and (report := callback.report) is not None:
            found: dict[str, Any] = {"model": report.model, "kernels": report.kernels}
            found |= {"replaced": report.replaced, "skipped": report.skipped}
            record(trainer, "injection", found)
