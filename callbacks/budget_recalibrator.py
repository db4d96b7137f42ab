"""Corrects costs and budgets while a run trains."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.callbacks.best_effort import BestEffort
from lightning_videoscale.callbacks.device_memory import MemoryGauge
from lightning_videoscale.callbacks.memory_monitor import MemoryMonitor
from lightning_videoscale.callbacks.out_of_memory import (
    OutOfMemory,
    folders_of,
    is_in_micro_batch,
    is_out_of_memory,
    keep,
    kept_in,
    machine_of,
)
from lightning_videoscale.callbacks.run_figures import RunFigures
from lightning_videoscale.cost import Calibration, Measurement, Recalibration
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.report import record
from lightning_videoscale.timing import MicroBatchLoad, StepWindow, load_of, subscribe_to_steps

_WARM_UP = 3  # optimizer steps whose times are not those to come: compilation, allocation, optimizer states
_UNKNOWN = [math.nan] * 5


class BudgetRecalibrator(RunFigures):
    """Corrects the cost model, M_comp, p and M_mem of a `VideoDataModule` by what the ranks really take.

    Every few optimizer steps rank 0 refits the costs to what the micro-batches of all ranks took, compute and exchanges
    (`Recalibration`: robust, smoothed, clamped, with hysteresis; a slow GPU is not taken for a wrong cost),
    M_mem follows the measured peaks of memory, and all ranks receive the result. Where it is worth a new plan, the data
    adopts it from the first step on that no rank has read. Every change is logged with its reason, and is in
    ``history``; to every logger go ``recalibration/m_comp`` or ``recalibration/target_sync``, ``recalibration/p``,
    ``recalibration/m_mem`` and ``recalibration/slowest_rank``, that rank's seconds over a healthy rank's.

    When a rank runs out of memory, its error says the shape and the figures, a note is kept beside the checkpoints, and
    a run that goes on from there lowers M_mem by itself. Delete the note to have the old budget back.

    On CUDA devices the statistics' peak is reset before every micro-batch; `MemoryMonitor` knows of it.

    Its state is in the checkpoint: a run that goes on continues the calibration. Nothing that goes wrong in reading or
    fitting the figures stops the training: it is reported once.

    Attributes:
        history: Every change: ``step``, ``version``, ``reason``, and the budget's `numbers`.
    """

    def __init__(self, every_n_steps: int = 20, target_sync: float | None = None) -> None:
        """Creates the callback.

        Args:
            every_n_steps: Optimizer steps from refit to refit.
            target_sync: Seconds that a micro-batch may take; from the first fit on, the budget is a `TimeBudget`. None:
                that of the budget that is a `TimeBudget`; M_comp keeps room for as many of the longest samples as in
                the first budget, whatever p becomes.

        Raises:
            ValueError: If a number is not positive.
        """
        if every_n_steps < 1 or (target_sync is not None and not target_sync > 0):
            raise ValueError(f"every_n_steps={every_n_steps} and target_sync={target_sync} must be positive.")
        self.every_n_steps = every_n_steps
        self.target_sync = target_sync
        self.history: list[dict[str, Any]] = []
        self._recalibration: Recalibration | None = None
        self._state: dict[str, Any] | None = None
        self._origin: dict[str, Any] = {}  # what the calibration began with, and on which machine
        self._load: MicroBatchLoad | None = None
        self._gauge: MemoryGauge | None = None
        self._best_effort = BestEffort("BudgetRecalibrator")

    @property
    def calibration(self) -> Calibration | None:
        """What holds now, the same on every rank; None before training."""
        return self._recalibration.calibration if self._recalibration else None

    def gauge_of(self, trainer: pl.Trainer) -> MemoryGauge | None:
        """Returns what reads the device's memory, or None where nothing can."""
        return MemoryGauge.of(trainer)

    # -- the Trainer's hooks -----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up the calibration, and lowers M_mem after an out-of-memory."""
        data, self._gauge = _planned_data(trainer), None
        if data is None or data.planner is None:
            rank_zero_warn("BudgetRecalibrator needs a VideoDataModule whose plan it can change: it does nothing here.")
            return
        planned = Calibration(data.planner.budget, data.planner.step_time)
        longest = int(data.planner.table.sequence_lengths.max())
        state = self.state_dict()["recalibration"]
        self._recalibration = Recalibration(planned, self.target_sync, longest)
        origin = {"planned": planned.to_dict(), "machine": [*machine_of(trainer)]}
        if state is not None and self._goes_on(state, planned):
            self._recalibration.load_state_dict(state)
            if self._origin.get("machine", origin["machine"]) != origin["machine"]:
                self._recalibration.forget_memory()
                rank_zero_info(
                    f"BudgetRecalibrator drops the checkpoint's peaks of memory: they are those of (device, ranks, "
                    f"sequence-parallel ranks) = {self._origin['machine']}, this run has {origin['machine']}. M_mem "
                    f"stays {self._recalibration.calibration.budget.m_mem:.0f} tokens until it is measured here."
                )
            origin["planned"] = self._origin.get("planned", origin["planned"])
        self._origin = origin
        self._heed_earlier_failures(trainer, self._recalibration)
        if self._recalibration.calibration != planned:
            data.adopt(self._recalibration.calibration)
        self._gauge = self.gauge_of(trainer)
        self._peaks: dict[int, float] = {}
        self._warm = trainer.global_step + _WARM_UP
        recalibrate = partial(self._recalibrate, trainer)
        subscribe_to_steps(trainer, self.every_n_steps, recalibrate, skip=_WARM_UP, add=self._memory)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remembers the micro-batch."""
        self._load = load_of(batch)
        if self._gauge is not None:
            for monitor in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
                if isinstance(monitor, MemoryMonitor):
                    monitor.keep_peak()
            self._best_effort.attempt("read the memory", self._gauge.reset_peak)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes the memory that the micro-batch took."""
        if self._gauge is None or self._load is None or trainer.global_step < self._warm:
            return
        peak = self._best_effort.attempt("read the memory", self._gauge.peak)
        if peak is not None and self._recalibration is not None:
            budget, load = self._recalibration.calibration.budget, self._load
            tokens = round(budget.memory_tokens(load.samples, load.sequence_length))
            self._peaks[tokens] = max(peak, self._peaks.get(tokens, 0.0))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Knows that the micro-batch had room."""
        self._load = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads the memory no more."""
        self._gauge = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Says which micro-batch did not fit, and keeps it for the restart."""
        data = _planned_data(trainer)
        load, self._load = self._load, None
        if load is None or not (is_out_of_memory(exception) and is_in_micro_batch(trainer)):
            return
        if data is not None and data.planner is not None:
            incident = OutOfMemory.of(trainer, load, data.planner.budget)
            exception.add_note(str(incident))
            for folder in folders_of(trainer):  # it may be resumed again from where it was resumed now
                self._best_effort.attempt("keep a note of the out-of-memory", keep, incident, folder)

    def state_dict(self) -> dict[str, Any]:
        """Returns the calibration, everything that the next one depends on, and the history."""
        state = self._recalibration.state_dict() if self._recalibration else self._state
        return {"recalibration": state, "history": [*self.history], **self._origin}

    def _begin_anew(self) -> None:
        self._recalibration, self._state, self._origin, self.history = None, None, {}, []

    def _go_on(self, state_dict: Mapping[str, Any]) -> None:
        self._recalibration, self._state = None, state_dict["recalibration"]
        self.history = [*state_dict["history"]]
        self._origin = {name: state_dict[name] for name in ("planned", "machine") if name in state_dict}

    def _goes_on(self, state: dict[str, Any], planned: Calibration) -> bool:
        """Whether a checkpoint's calibration counts: the data plans by it, or by what it began with then."""
        if "planned" not in self._origin or planned.to_dict() in (self._origin["planned"], state["calibration"]):
            return True
        rank_zero_info(
            f"BudgetRecalibrator begins anew: the data has {planned.budget}, and another budget was in force when the "
            "checkpoint was made."
        )
        return False

    # -- one window --------------------------------------------------------------------------------------------------

    def _recalibrate(self, trainer: pl.Trainer, window: StepWindow) -> None:
        """Has rank 0 decide, and hands the decision to the data."""
        assert self._recalibration is not None
        if window.steps < self.every_n_steps:
            return  # what is left when training ends
        decided = self._best_effort.attempt("fit the costs", self._decide, window) if trainer.is_global_zero else None
        decision = trainer.strategy.broadcast(decided)
        if decision is None:
            return
        self._recalibration.load_state_dict(decision["state"])
        self._announce(trainer, decision["changed"], decision["reason"])
        data = _planned_data(trainer)
        if decision["changed"] and data is not None:
            data.adopt(self._recalibration.calibration)

    def _memory(self) -> list[float]:
        """Tokens and peak of this rank's smallest and largest micro-batch since the last call, and the capacity."""
        peaks, self._peaks, gauge = self._peaks, {}, self._gauge
        memory = self._best_effort.attempt("read the memory", gauge.read) if gauge is not None and peaks else None
        if memory is None:
            return _UNKNOWN
        least, most = min(peaks), max(peaks)
        return [least, peaks[least], most, peaks[most], memory.capacity]

    def _decide(self, window: StepWindow) -> dict[str, Any]:
        """What follows from a window."""
        # What fails half-way must not leave half a state.
        trial = copy.deepcopy(self._recalibration)
        assert trial is not None
        memory = window.values[window.values.isfinite().all(dim=1)]
        peaks = {int(tokens): peak for tokens, peak in sorted(memory[:, :4].reshape(-1, 2).tolist())}
        capacity = float(memory[:, 4].min()) if len(memory) else None
        outcome = trial.update(observations_of(window), peaks, capacity)
        return {"state": trial.state_dict(), "changed": outcome.changed, "reason": outcome.reason}

    def _announce(self, trainer: pl.Trainer, changed: bool, reason: str) -> None:
        assert self._recalibration is not None
        calibration, speeds = self._recalibration.calibration, self._recalibration.speeds
        budget = calibration.budget
        now = budget.numbers
        if changed:
            self.history.append({"step": trainer.global_step, "version": calibration.version, **now, "reason": reason})
            rank_zero_info(f"BudgetRecalibrator, step {trainer.global_step}, version {calibration.version}: {reason}.")
        record(trainer, "budget", {"adopted": changed, "reason": reason, **now})
        figures = {f"recalibration/{name}": value for name, value in now.items()}
        figures["recalibration/slowest_rank"] = max(speeds.values(), default=1.0)
        self._best_effort.log(trainer, figures)

    def _heed_earlier_failures(self, trainer: pl.Trainer, recalibration: Recalibration) -> None:
        """Lowers M_mem below what an earlier run on this machine could not hold."""
        kept = self._best_effort.attempt("read notes of earlier runs", kept_in, folders_of(trainer))
        incidents = trainer.strategy.broadcast(kept or [])
        budget, machine = recalibration.calibration.budget, machine_of(trainer)
        before = budget.m_mem
        # Counted as by the budget that holds now, which may be another one than that of the run before.
        incidents = [replace(incident, overhead_tokens=budget.overhead_tokens) for incident in incidents]
        heeded = [incident for incident in incidents if incident.machine == machine]
        for incident in incidents:
            if incident.machine != machine:
                rank_zero_warn(f"BudgetRecalibrator leaves M_mem as it is after this, on another machine: {incident}")
            else:
                recalibration.limit_memory(incident.m_mem_after)
        after = recalibration.calibration.budget.m_mem
        if after < before:
            decisive = min(heeded, key=lambda incident: incident.m_mem_after)
            self._announce(trainer, True, f"M_mem from {before:.0f} to {after:.0f} tokens, after: {decisive}")


def observations_of(window: StepWindow) -> list[Measurement]:
    """One measurement per data-parallel rank and micro-batch that tells its load."""
    samples, length, work = (window.of_groups(name) for name in ("samples", "sequence_length", "work"))
    dp_ranks = torch.tensor(sorted(set(window.dp_ranks)))[:, None].expand_as(samples)
    rows = torch.stack([dp_ranks, samples, length, work], dim=2)
    return [Measurement(int(b), int(s), seconds, dp_rank=int(r)) for r, b, s, seconds in rows[samples > 0].tolist()]


def _planned_data(trainer: pl.Trainer) -> VideoDataModule | None:
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, VideoDataModule) else None
