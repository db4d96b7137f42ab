"""Corrects costs and budgets while a run trains."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_videoscale.callbacks.gathering import gather_rows
from lightning_videoscale.callbacks.guard import Guard
from lightning_videoscale.callbacks.memory_monitor import MemoryMonitor
from lightning_videoscale.callbacks.out_of_memory import (
    OutOfMemory,
    folders_of,
    is_out_of_memory,
    keep,
    kept_in,
    machine_of,
)
from lightning_videoscale.callbacks.peak_memory import PeakMemory
from lightning_videoscale.cost import Calibration, Observation, Recalibration
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.batch_load import BatchLoad, load_of
from lightning_videoscale.report import record
from lightning_videoscale.timing import StepWatch, watch_steps
from lightning_videoscale.topology import topology_of

_WARM_UP = 3  # optimizer steps whose times are not those to come: compilation, allocation, optimizer states
_PEAKS = 2  # of a rank's smallest and largest micro-batch


class BudgetRecalibrator(pl.Callback):
    """Corrects the cost model, M_comp, p and M_mem of a `VideoDataModule` by what the ranks really take.

    Every few optimizer steps the compute times of all micro-batches come together in one gather. Rank 0 refits the
    costs (`Recalibration`: robust, smoothed, clamped, with hysteresis; a slow GPU is told apart from a wrong cost),
    M_mem follows the measured peaks of memory, and all ranks receive the result. Where it is worth a new plan, the data
    adopts it from the first step on that no rank has read. Every change is logged with its reason, and is in
    ``history``; to every logger go ``recalibration/m_comp``, ``recalibration/p``, ``recalibration/m_mem`` and
    ``recalibration/slowest_rank``, that rank's seconds over a healthy rank's.

    When a rank runs out of memory, its error says the shape and the figures, a note is kept beside the checkpoints, and
    a run that goes on from there lowers M_mem by itself. Delete the note to have the old budget back.

    On CUDA devices the statistics' peak is reset before every micro-batch; `MemoryMonitor` knows of it.

    Its state is in the checkpoint: a run that goes on continues the calibration. Nothing that goes wrong in reading or
    fitting the figures stops the training: it is reported once.

    Attributes:
        history: Every change: ``step``, ``version``, ``m_mem``, ``m_comp``, ``p`` and ``reason``.
    """

    def __init__(self, every_n_steps: int = 20, target_sync: float | None = None) -> None:
        """Creates the callback.

        Args:
            every_n_steps: Optimizer steps from refit to refit.
            target_sync: Seconds that a micro-batch may take: M_comp = (target_sync - a) / b. None: M_comp keeps room
                for as many of the longest samples as in the first budget, whatever p becomes.

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
        self._watch: StepWatch | None = None
        self._load: BatchLoad | None = None
        self._guard = Guard("BudgetRecalibrator")

    @property
    def calibration(self) -> Calibration | None:
        """What holds now, the same on every rank; None before training."""
        return self._recalibration.calibration if self._recalibration else None

    def peak_memory_of(self, device: torch.device) -> PeakMemory | None:
        """Returns what reads the peaks of the device's memory, or None where nothing can."""
        return PeakMemory(device) if device.type == "cuda" else None

    # -- the Trainer's hooks -----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up the calibration, and lowers M_mem after an out-of-memory."""
        data = _planned_data(trainer)
        if data is None or data.planner is None:
            rank_zero_warn("BudgetRecalibrator needs a VideoDataModule whose plan it can change: it does nothing here.")
            return
        planned = Calibration(data.planner.budget, data.planner.step_time)
        longest = int(data.planner.table.sequence_lengths.max())
        self._recalibration = Recalibration(planned, self.target_sync, longest)
        if self._state is not None:
            self._recalibration.load_state_dict(self._state)
        self._heed_earlier_failures(trainer, self._recalibration)
        if self._recalibration.calibration != planned:
            data.adopt(self._recalibration.calibration)
        self._watch = watch_steps(trainer)
        self._peaks = self.peak_memory_of(trainer.strategy.root_device)
        self._loads: list[BatchLoad | None] = []
        self._global_step = trainer.global_step
        self._steps, self._warm_up = 0, _WARM_UP

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remembers the micro-batch."""
        self._load = load_of(batch)
        if self._watch is not None and self._peaks is not None:
            for monitor in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
                if isinstance(monitor, MemoryMonitor):
                    monitor.keep_peak()
            self._guard.attempt("read the memory", self._peaks.begin)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes the memory that the micro-batch took."""
        if self._watch is not None and self._peaks is not None and self._load is not None and not self._warm_up:
            tokens, peaks = self._load.samples * self._load.sequence_length, self._peaks
            self._guard.attempt("read the memory", lambda: peaks.end(tokens))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the micro-batch's load, and recalibrates when enough optimizer steps are complete."""
        if self._watch is None:
            return
        self._loads.append(self._load)
        self._load = None
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1
        if self._warm_up:
            self._warm_up -= 1
            if not self._warm_up:
                self._steps = 0
                self._loads.clear()
                self._watch.read()
        elif self._steps >= self.every_n_steps:
            self._steps = 0
            self._recalibrate(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the clock."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Says which micro-batch did not fit, and keeps it for the restart."""
        data = _planned_data(trainer)
        if is_out_of_memory(exception) and self._load is not None and data is not None and data.planner is not None:
            incident = OutOfMemory.of(trainer, self._load, data.planner.budget.m_mem)
            exception.add_note(str(incident))
            self._guard.attempt("keep a note of the out-of-memory", lambda: keep(incident, folders_of(trainer)[0]))

    def state_dict(self) -> dict[str, Any]:
        """Returns the calibration, everything that the next one depends on, and the history."""
        state = self._recalibration.state_dict() if self._recalibration else self._state
        return {"recalibration": state, "history": [*self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them up again."""
        self._state = state_dict["recalibration"]
        self.history = [*state_dict["history"]]

    # -- one window --------------------------------------------------------------------------------------------------

    def _recalibrate(self, trainer: pl.Trainer) -> None:
        """Brings the window together, has rank 0 decide, and hands the decision to the data."""
        assert self._recalibration is not None
        loads, self._loads = self._loads, []
        rows = torch.full((len(loads) + _PEAKS, 4), math.nan, dtype=torch.float64)
        self._guard.attempt("read the times", lambda: self._fill(rows, loads, topology_of(trainer).data_parallel_rank))
        # Ranks meet whatever went wrong on one of them: without it the others would wait.
        ranks = gather_rows(trainer, rows)
        decided = self._guard.attempt("fit the costs", lambda: self._decide(ranks)) if trainer.is_global_zero else None
        decision = trainer.strategy.broadcast(decided)
        if decision is None:
            return
        self._recalibration.load_state_dict(decision["state"])
        self._announce(trainer, decision["changed"], decision["reason"])
        data = _planned_data(trainer)
        if decision["changed"] and data is not None:
            data.adopt(self._recalibration.calibration)

    def _fill(self, rows: Tensor, loads: list[BatchLoad | None], dp_rank: int) -> None:
        """Writes this rank's window: per micro-batch rank, B, S, seconds; then per peak tokens, bytes, capacity."""
        assert self._watch is not None
        for row, load, times in zip(rows, loads, self._watch.read(), strict=False):
            if load is not None:
                row[:] = torch.tensor([dp_rank, load.samples, load.sequence_length, times.compute], dtype=torch.float64)
        if self._peaks is not None:
            for row, (tokens, peak) in zip(rows[-_PEAKS:], self._peaks.take(), strict=False):
                row[:3] = torch.tensor([tokens, peak, self._peaks.capacity()], dtype=torch.float64)

    def _decide(self, ranks: Tensor) -> dict[str, Any]:
        """What follows from all ranks' rows, (ranks, micro-batches + peaks, 4)."""
        assert self._recalibration is not None
        # What fails half-way must not leave half a state.
        trial = copy.deepcopy(self._recalibration)
        memory = [row for row in ranks[:, -_PEAKS:, :3].reshape(-1, 3).tolist() if math.isfinite(row[2])]
        peaks = {int(tokens): peak for tokens, peak, _ in sorted(memory)}
        capacity = min((row[2] for row in memory), default=None)
        outcome = trial.update(observations_of(ranks[:, :-_PEAKS]), peaks, capacity)
        return {"state": trial.state_dict(), "changed": outcome.changed, "reason": outcome.reason}

    def _announce(self, trainer: pl.Trainer, changed: bool, reason: str) -> None:
        assert self._recalibration is not None
        calibration, speeds = self._recalibration.calibration, self._recalibration.speeds
        budget = calibration.budget
        now = {"m_mem": budget.m_mem, "m_comp": budget.m_comp, "p": budget.p}
        if changed:
            self.history.append({"step": trainer.global_step, "version": calibration.version, **now, "reason": reason})
            rank_zero_info(f"BudgetRecalibrator, step {trainer.global_step}, version {calibration.version}: {reason}.")
        record(trainer, "budget", {"adopted": changed, "reason": reason, **now})
        figures = {f"recalibration/{name}": value for name, value in now.items()}
        figures["recalibration/slowest_rank"] = max(speeds.values(), default=1.0)
        self._guard.log(trainer, figures)

    def _heed_earlier_failures(self, trainer: pl.Trainer, recalibration: Recalibration) -> None:
        """Lowers M_mem below what an earlier run on this machine could not hold."""
        kept = self._guard.attempt("read notes of earlier runs", lambda: kept_in(folders_of(trainer)))
        incidents = trainer.strategy.broadcast(kept or [])
        before = recalibration.calibration.budget.m_mem
        for incident in incidents:
            if incident.machine != machine_of(trainer):
                rank_zero_warn(f"BudgetRecalibrator leaves M_mem as it is after this, on another machine: {incident}")
            else:
                recalibration.limit_memory(incident.m_mem_after)
        after = recalibration.calibration.budget.m_mem
        if after < before:
            self._announce(trainer, True, f"M_mem from {before:.0f} to {after:.0f} tokens, after: {incidents[-1]}")


def observations_of(ranks: Tensor) -> list[Observation]:
    """One observation per data-parallel rank and micro-batch: that of the slowest sequence-parallel peer.

    Args:
        ranks: (ranks, micro-batches, 4): data-parallel rank, B, S, seconds; NaN where a rank knows nothing.
    """
    slowest: dict[tuple[int, float], Observation] = {}
    for rows in ranks.tolist():
        for number, row in enumerate(rows):
            observed = Observation(*row)
            if math.isfinite(observed.dp_rank) and math.isfinite(observed.seconds):
                other = slowest.get((number, observed.dp_rank))
                if other is None or other.seconds < observed.seconds:
                    slowest[number, observed.dp_rank] = observed
    return [*slowest.values()]


def _planned_data(trainer: pl.Trainer) -> VideoDataModule | None:
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, VideoDataModule) else None
