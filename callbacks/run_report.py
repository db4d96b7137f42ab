"""Keeps the log of a run, and draws the report from it when `fit` is over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_videoscale.callbacks.batch_load import load_of
from lightning_videoscale.callbacks.fused_kernels import FusedKernels
from lightning_videoscale.data import BucketPlanner
from lightning_videoscale.report import RunLog, record, write_report
from lightning_videoscale.report.context import plan_record, start_record
from lightning_videoscale.report.window import MicroBatchRow, window_record
from lightning_videoscale.timing import StepWatch, watch_steps
from lightning_videoscale.topology import topology_of

_STEPS_BETWEEN_RECORDS_WITHOUT_LOGGING = 50


class RunReport(pl.Callback):
    """Writes one HTML file about the run: is it balanced, how fast was it, what did it cost, what should be done.

    While it trains, rank 0 appends to ``run_log.jsonl`` what all ranks measured, every few optimizer steps, and what
    other callbacks hand in (`lightning_videoscale.report.record`): `LoadBalanceMonitor` need not be there, while
    `MemoryMonitor`, `FusedKernels`, `BudgetRecalibrator` and `BottleneckAnalyzer` each fill a section. When `fit` ends,
    also by an exception, ``report.html`` is drawn from the log and lies beside it; after a kill,
    ``videoscale report FOLDER`` draws it. The page needs no network and no program but a browser.

    Ranks meet once per record, in one float64 gather. Nothing that goes wrong in recording or drawing stops the
    training: it is said once.

    Attributes:
        run_log: The log; None on other ranks than 0, and before the Trainer's setup.
        path: The report, once it is drawn.
    """

    def __init__(self, folder: str | Path | None = None, every_n_steps: int | None = None) -> None:
        """Creates the callback.

        Args:
            folder: Where log and report lie; None: the Trainer's ``log_dir``, which is the first logger's, or else
                ``default_root_dir``.
            every_n_steps: Optimizer steps from record to record; None takes the Trainer's ``log_every_n_steps``.

        Raises:
            ValueError: ``every_n_steps`` is below 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, or None; got {every_n_steps}.")
        self.folder = None if folder is None else Path(folder)
        self.every_n_steps = every_n_steps
        self.run_log: RunLog | None = None
        self.path: Path | None = None
        self._watch: StepWatch | None = None
        self._is_training = False
        self._plan: dict[str, Any] | None = None
        self._said: set[str] = set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the folder; from here on callbacks may record."""
        if stage != "fit":
            return
        logged = trainer.log_dir  # collective
        if trainer.is_global_zero:
            self.run_log = RunLog(self.folder or Path(logged or trainer.default_root_dir))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records what the run is, and opens the first window."""
        log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        self._interval = self.every_n_steps or log_every_n_steps or _STEPS_BETWEEN_RECORDS_WITHOUT_LOGGING
        self._global_step = trainer.global_step
        self._rows: list[MicroBatchRow] = []
        self._steps: list[int] = []
        self._plan = None
        self._is_training = True
        self._dp_rank = topology_of(trainer).data_parallel_rank
        self._watch = self._guard("watch the steps", lambda: watch_steps(trainer))
        self._guard("describe the run", lambda: record(trainer, "start", start_record(trainer, pl_module)))
        self._guard("describe the injection", lambda: self._record_injection(trainer))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records the plan where it is new."""
        self._guard("describe the plan", lambda: self._record_plan(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the micro-batch, and records when enough optimizer steps are complete."""
        if self._watch is None:
            return
        row = self._guard("read the batch", lambda: MicroBatchRow.of(self._dp_rank, load_of(batch)))
        self._rows.append(row or MicroBatchRow.of(self._dp_rank, None))
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._steps.append(len(self._rows) - sum(self._steps))
        if len(self._steps) >= self._interval:
            self._record_window(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records the steps since the last record."""
        if self._steps:
            self._record_window(trainer)
        self._close()
        self._is_training = False

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the report."""
        self._finish(trainer, {"status": "completed"})

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Draws what there is to draw; the steps since the last record are lost, as ranks cannot meet any more."""
        if not self._is_training:
            return  # it failed before training, or outside of `fit`
        self._is_training = False
        self._close()
        stopped = isinstance(exception, KeyboardInterrupt)
        self._finish(trainer, {"status": "interrupted" if stopped else "failed", "error": repr(exception)[:2000]})

    def _record_plan(self, trainer: pl.Trainer) -> None:
        planner = getattr(getattr(trainer, "datamodule", None), "planner", None)
        if not isinstance(planner, BucketPlanner):
            return
        plan = plan_record(planner, trainer.current_epoch)
        unnumbered = {name: value for name, value in plan.items() if name != "epoch"}
        if unnumbered != self._plan:
            self._plan = unnumbered
            record(trainer, "plan", plan)

    def _record_injection(self, trainer: pl.Trainer) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for callback in callbacks:
            if isinstance(callback, FusedKernels) and (report := callback.report) is not None:
                found = {"model": report.model, "replaced": report.replaced, "skipped": report.skipped}
                record(trainer, "injection", found)

    def _record_window(self, trainer: pl.Trainer) -> None:
        """Gathers the window from all ranks, and records it."""
        assert self._watch is not None
        steps, self._steps = self._steps, []
        rows, self._rows = self._rows, []
        # The gather stays outside the guard: a rank that skipped it would leave the others waiting.
        columns = [[*row, *times] for row, times in zip(rows, self._watch.read(), strict=True)]
        everything = _gather(trainer, torch.tensor(columns[: sum(steps)], dtype=torch.float64))
        if trainer.is_global_zero:
            self._guard("record", lambda: record(trainer, "window", window_record(everything, steps)))

    def _finish(self, trainer: pl.Trainer, end: dict[str, str]) -> None:
        if self.run_log is None:
            return
        record(trainer, "end", end)
        folder = self.run_log.folder
        self.path = self._guard("draw the report", lambda: write_report(folder))
        if self.path is not None:
            rank_zero_info(f"Report of the run: {self.path}")

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _guard(self, what: str, act: Callable[[], Any]) -> Any:
        """Returns ``act()``, or None after saying what went wrong."""
        try:
            return act()
        except Exception as error:
            if what not in self._said:
                self._said.add(what)
                warnings.warn(f"RunReport could not {what}, training goes on: {error!r}", stacklevel=2)
            return None


def _gather(trainer: pl.Trainer, rows: Tensor) -> Tensor:
    """Returns every rank's rows on the host, shape (ranks, *rows.shape)."""
    if trainer.world_size == 1:
        return rows[None]
    gathered = trainer.strategy.all_gather(rows.to(trainer.strategy.root_device))
    return gathered.cpu()
