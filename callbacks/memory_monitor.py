"""Watches the GPUs' memory, and how many more tokens would fit into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_videoscale.callbacks.best_effort import BestEffort
from lightning_videoscale.callbacks.device_memory import DeviceMemory, MemoryGauge
from lightning_videoscale.callbacks.out_of_memory import machine_of
from lightning_videoscale.callbacks.run_figures import RunFigures
from lightning_videoscale.cost import Measurement, MemoryModel
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.report import record
from lightning_videoscale.timing import Pauses, StepWindow, check_interval, subscribe_to_steps

_GIB = 2**30
_SHAPES_FOR_A_LINE = 3


class MemoryMonitor(RunFigures):
    """Logs how full the GPUs are, and how many more tokens would fit.

    Every few optimizer steps it logs, each the largest over all ranks,

    - ``memory/allocated_gib`` and ``memory/reserved_gib``, at the end of the step;
    - ``memory/peak_gib``, the most that was allocated since the last report, validation and sampling left out;
    - ``memory/graphs_gib``, of it for CUDA graphs, where networks run by some;
    - ``memory/fragmentation``, the share of the reserved memory that lies in gaps between tensors;
    - ``memory/fits_tokens``, what a micro-batch may have on the fullest GPU: M_mem of a `MemoryModel`, with its reserve
      kept free, and 0 where not even one token fits;
    - ``memory/overhead_tokens``, where that counts every sample as so many tokens more than it has: by the model given,
      or by the budget of a `VideoDataModule`;
    - ``memory/headroom_tokens``, what the largest micro-batch of the window could grow by until then.

    Without a model given, a line is fitted through the largest micro-batch and the peak of every window so far; until
    three token counts were seen the last three are not logged. These points and the largest peak are in the checkpoint;
    points of a run on other GPUs, or another number of them, are dropped with a warning, since the model's states take
    other room there.

    It works on CUDA devices; elsewhere it says so once and logs nothing. Peaks are reset at every report, for every
    other reader of this process too. The steps are those of the Trainer's one log (`timing.subscribe_to_steps`).
    Nothing that goes wrong in reading, computing or logging the figures stops the training: it is reported once.

    Attributes:
        peak_bytes: Largest peak of the run so far on any rank.
        peaks: Largest peak in bytes by tokens of a window's largest micro-batch, overheads of the budget among them.
    """

    def __init__(self, every_n_steps: int = 50, memory_model: MemoryModel | None = None) -> None:
        """Creates the monitor.

        Args:
            every_n_steps: Optimizer steps from report to report.
            memory_model: What a micro-batch takes; None fits it to what is observed.

        Raises:
            ValueError: ``every_n_steps`` is below 1.
        """
        self.every_n_steps = check_interval(every_n_steps)
        self.memory_model = memory_model
        self.peak_bytes = 0.0
        self.peaks: dict[int, float] = {}
        self._machine: tuple[object, ...] | None = None
        self._overhead = 0.0  # tokens that the data's budget counts of a sample beside its own
        self._gauge: MemoryGauge | None = None
        self._pauses = Pauses()
        self._best_effort = BestEffort("MemoryMonitor")

    def gauge_of(self, trainer: pl.Trainer) -> MemoryGauge | None:
        """Returns what reads the device's memory, or None where nothing can."""
        return MemoryGauge.of(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Subscribes to the steps."""
        device = trainer.strategy.root_device
        self._gauge = self.gauge_of(trainer)
        if self._gauge is None:
            self._best_effort.say_once(f"MemoryMonitor reads the memory of CUDA devices; on {device} it logs nothing.")
            return
        self._keep_peaks_of_this_machine(trainer)
        self._keep_peaks_of_this_budget(trainer)
        self._peak_so_far, self._pauses = 0.0, Pauses()
        self._best_effort.attempt("reset the peak", self._gauge.reset_peak)
        read = partial(self._read, self._gauge)
        subscribe_to_steps(trainer, self.every_n_steps, partial(self._report, trainer), add=read)

    def keep_peak(self) -> None:
        """Notes the peak since the last reset; to be called before anyone else resets it."""
        if self._gauge is not None:
            memory = self._best_effort.attempt("read the memory", self._gauge.read)
            self._peak_so_far = max(self._peak_so_far, memory.peak if memory else 0.0)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the peak of the training steps so far."""
        self.look_away()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forgets the peak of the validation."""
        self.look_again()

    def look_away(self) -> None:
        """Keeps the peak of the training steps so far."""
        if self._pauses.begin():
            self.keep_peak()

    def look_again(self) -> None:
        """Forgets the peak of what was no training."""
        if self._pauses.end() and self._gauge is not None:
            self._best_effort.attempt("reset the peak", self._gauge.reset_peak)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads no more."""
        self._gauge = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the run's largest peak, the observed points and the machine that they belong to."""
        peaks = {"peak_bytes": self.peak_bytes, "peaks": dict(self.peaks)}
        return peaks | {"machine": self._machine, "overhead_tokens": self._overhead}

    def _begin_anew(self) -> None:
        self.peak_bytes, self.peaks, self._machine, self._overhead = 0.0, {}, None, 0.0

    def _go_on(self, state_dict: Mapping[str, Any]) -> None:
        self.peak_bytes = state_dict["peak_bytes"]
        self.peaks = dict(state_dict["peaks"])
        self._machine = state_dict["machine"]
        self._overhead = state_dict.get("overhead_tokens", 0.0)  # earlier releases counted none

    def _keep_peaks_of_this_machine(self, trainer: pl.Trainer) -> None:
        """Drops points that were observed on other devices or on another number of ranks."""
        machine = machine_of(trainer)
        if self.peaks and machine != self._machine:
            self._best_effort.say_once(
                f"MemoryMonitor drops the peaks of the checkpoint: they are those of (device, ranks, sequence-parallel "
                f"ranks) = {self._machine}, this run has {machine}."
            )
            self.peaks, self.peak_bytes = {}, 0.0
        self._machine = machine

    def _keep_peaks_of_this_budget(self, trainer: pl.Trainer) -> None:
        """Drops points whose tokens were counted by another overhead than that of the data's budget."""
        planner = getattr(getattr(trainer, "datamodule", None), "planner", None)
        overhead = planner.budget.overhead_tokens if isinstance(planner, BucketPlanner) else 0.0
        if self.peaks and overhead != self._overhead:
            self._best_effort.say_once(
                f"MemoryMonitor drops the peaks of the checkpoint by tokens: a sample counted as {self._overhead:g} "
                f"tokens more than it has, and now it does as {overhead:g} more."
            )
            self.peaks = {}
        self._overhead = overhead

    def _read(self, gauge: MemoryGauge) -> DeviceMemory:
        """This rank's memory at the end of a window; NaN where it cannot be read."""
        memory = self._best_effort.attempt("read the memory", gauge.read)
        self._best_effort.attempt("reset the peak", gauge.reset_peak)
        peak_so_far, self._peak_so_far = self._peak_so_far, 0.0
        if memory is None:
            return DeviceMemory(*[math.nan] * len(DeviceMemory._fields))
        return memory._replace(peak=max(memory.peak, peak_so_far))

    def _report(self, trainer: pl.Trainer, window: StepWindow) -> None:
        """Logs the memory of all ranks."""
        figures = self._best_effort.attempt("compute its figures", self._figures, window)
        if figures:
            record(trainer, "memory", {name.removeprefix("memory/"): value for name, value in figures.items()})
            self._best_effort.log(trainer, figures)

    def _figures(self, window: StepWindow) -> dict[str, float]:
        """Returns what is logged of all ranks, and adds them to the run's."""
        could_read = window.values.isfinite().all(dim=1)
        if not could_read.any():
            return {}
        memories = [DeviceMemory(*row) for row in window.values[could_read].tolist()]
        self.peak_bytes = max(self.peak_bytes, *(memory.peak for memory in memories))
        figures = {
            "memory/allocated_gib": max(memory.allocated for memory in memories) / _GIB,
            "memory/reserved_gib": max(memory.reserved for memory in memories) / _GIB,
            "memory/peak_gib": max(memory.peak for memory in memories) / _GIB,
            "memory/fragmentation": max(memory.fragmentation for memory in memories),
        }
        if any(memory.graphs for memory in memories):
            figures["memory/graphs_gib"] = max(memory.graphs for memory in memories) / _GIB
        tokens = [round(count) for count in _largest(window, self._overhead)[could_read].tolist()]
        if not all(tokens):
            self._best_effort.say_once(
                "MemoryMonitor found no `meta` with samples and sequence_length in the batches (VideoDataModule adds "
                "it): it logs no headroom."
            )
            return figures
        for count, memory in zip(tokens, memories, strict=True):
            self.peaks[count] = max(self.peaks.get(count, 0.0), memory.peak)
        fits = self._best_effort.attempt("compute the headroom", self._fits, memories)
        if fits is not None:
            figures["memory/fits_tokens"] = float(fits)
            overhead = self._overhead
            if self.memory_model is not None:
                overhead = self.memory_model.overhead_tokens(min(memory.capacity for memory in memories))
            if overhead:
                figures["memory/overhead_tokens"] = overhead
            taken = _largest(window, overhead)[could_read].max()
            figures["memory/headroom_tokens"] = float(fits - taken)  # below 0 where it is exceeded
        return figures

    def _fits(self, memories: list[DeviceMemory]) -> int | None:
        """Returns the tokens that fit on the fullest GPU; None while there are too few points for a line."""
        model = self.memory_model
        if model is None:
            if len(self.peaks) < _SHAPES_FOR_A_LINE:
                return None
            model = MemoryModel.fit([Measurement(1, count, 0.0, peak) for count, peak in self.peaks.items()])
        return model.fits(min(memory.capacity for memory in memories))


def _largest(window: StepWindow, overhead: float) -> Tensor:
    """The most B * (S + overhead) of a micro-batch, (ranks,); 0 where the batches do not tell."""
    return (window.column("samples") * (window.column("sequence_length") + overhead)).amax(dim=1)
