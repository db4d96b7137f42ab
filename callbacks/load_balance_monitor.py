"""Watches how evenly the ranks are loaded, and how fast they are together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_videoscale.callbacks.balance_metrics import BalanceMetrics
from lightning_videoscale.callbacks.balance_pictures import BalancePictures
from lightning_videoscale.callbacks.best_effort import BestEffort
from lightning_videoscale.callbacks.run_figures import RunFigures
from lightning_videoscale.compat.deepspeed import full_numel
from lightning_videoscale.compat.lightning.training_loop import logged_step
from lightning_videoscale.cost import TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.timing import Pauses, StepWindow, check_interval, subscribe_to_steps


class LoadBalanceMonitor(RunFigures):
    """Logs how evenly the ranks are loaded, and how fast they are together.

    Every few optimizer steps it logs, of those steps, each a mean over them,

    - ``balance/cv_step``: (max - min) / max of the data-parallel ranks' times for their work (`StepTimeSpread`);
    - ``balance/compute_cv``: std / mean of their loads B * S**p (`ComputeCV`), ``balance/cost_cv`` of the costs that
      the planner predicted, ``balance/physical_load`` the mean of B * S**2 (`PhysicalLoad`), and
      ``balance/padding_share`` the share of tokens that only fill gaps;
    - ``time/...``, seconds per step of the mean rank: ``compute``, ``data`` (waiting for the loader), ``exchange``
      (sequence-parallel exchanges that nothing hid), ``reduction`` (gathering parameters and averaging gradients, as
      far as nothing hid it), ``straggler`` (waiting for slower ranks) and ``optimizer``;
    - ``throughput/tokens_per_second`` and ``throughput/samples_per_second`` of all ranks together, a sequence-parallel
      group counted once, fillers not at all, validation and sampling not timed; ``throughput/efficiency``, latent
      tokens per second and rank (Θ of `ThroughputEfficiency`); ``throughput/mfu``, if the peak of the devices is given;

    to every logger, and ``cv_step`` and ``tokens/s`` to the progress bar. `summary` gives the same for the whole run,
    which goes on where a checkpoint is resumed or the Trainer fits again. A checkpoint has the steps up to the last
    report. Every ``pictures_every_n_steps`` steps, and at the end, TensorBoard gets a map of the compute and waiting
    times of every rank in every step, and a histogram of CV_step.

    The work of a rank is its forward and backward passes and its sequence-parallel exchanges, without what it waited
    for other ranks (see `timing.StepTimes`): with the waits all ranks would look alike. A sequence-parallel group takes
    as long as its slowest rank. An optimizer step counts the sum over its accumulated micro-batches. On a GPU the times
    are read from CUDA events without stopping the device.

    The steps are those of the Trainer's one log (`timing.subscribe_to_steps`). Nothing that goes wrong in computing,
    drawing or logging stops the training: it is reported once. Batches without a ``meta`` (see `VideoDataModule`) leave
    only ``balance/cv_step`` and ``time/...``, which is said once.

    Attributes:
        metrics: The figures of the run so far.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        p: float = 2.0,
        pictures_every_n_steps: int = 500,
        geometry: str | ModelGeometry = "wan2.1",
        peak_flops_per_second: float | None = None,
    ) -> None:
        """Creates the monitor.

        Args:
            every_n_steps: Optimizer steps from report to report; None takes the Trainer's ``log_every_n_steps``.
            p: Exponent of the sequence length in the load B * S**p.
            pictures_every_n_steps: Optimizer steps in one picture, at least; it is drawn with a report.
            geometry: The model's VAE, by the name of its family or by its factors; needed where batches hold pixels.
            peak_flops_per_second: What the data sheet promises of one device for the dtype of the matrix products,
                dense (bfloat16 on an H100 or H200: 989e12); None: no MFU. The work is that of the one transformer
                of diffusers in the LightningModule that is trained, without gradients of its frozen weights.

        Raises:
            ValueError: A number of steps is below 1, or the geometry is not known by that name.
        """
        if isinstance(geometry, str) and geometry not in GEOMETRIES:
            raise ValueError(f"geometry={geometry!r} is none of {sorted(GEOMETRIES)}; give a ModelGeometry instead.")
        self.every_n_steps = check_interval(every_n_steps)
        self.peak_flops_per_second = peak_flops_per_second
        self.metrics = BalanceMetrics(p, GEOMETRIES[geometry] if isinstance(geometry, str) else geometry)
        self._pictures = BalancePictures(check_interval(pictures_every_n_steps) or 1)
        self._best_effort = BestEffort("LoadBalanceMonitor")
        self._window_begin = self._pause_begin = self._last_end = 0.0
        self._pauses = Pauses()
        self._shown: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """Returns the figures of the run so far: cv_step, compute_cv, cost_cv, tokens_per_second, samples, tokens, ...

        A figure that was never known (no ``meta`` in the batches, no step yet) is left out.
        """
        return self.metrics.summary()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Subscribes to the steps."""
        subscribe_to_steps(trainer, self.every_n_steps, partial(self._report, trainer))
        self._window_begin = self._last_end = time.perf_counter()
        self._pauses, self._shown = Pauses(), {}
        if self.peak_flops_per_second is not None:
            count = partial(TransformerFlops.of_module, pl_module, full_numel)
            transformer = self._best_effort.attempt("count the model's FLOPs", count)
            self.metrics.flops = None if transformer is None else (transformer, self.peak_flops_per_second)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows the last report in the progress bar."""
        if self._shown:
            pl_module.log_dict(self._shown, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
            self._shown = {}
        self._last_end = time.perf_counter()

    def look_away(self) -> None:
        """Stops counting wall time."""
        if self._pauses.begin():
            self._pause_begin = time.perf_counter()

    def look_again(self) -> None:
        """Goes on counting wall time."""
        if self._pauses.end():
            self._last_end = time.perf_counter()
            self._window_begin += self._last_end - self._pause_begin

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops counting wall time, from the last batch on: the loaders of the validation have started by now."""
        if self._pauses.begin():
            self._pause_begin = self._last_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Goes on counting wall time."""
        self.look_again()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the steps since the last picture."""
        self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of the run so far."""
        return self.metrics.state_dict()

    def _begin_anew(self) -> None:
        self.metrics.load_state_dict({"sums": {}})
        self._pictures.hand_to([])  # what a fit that failed has left

    def _go_on(self, state_dict: Mapping[str, Any]) -> None:
        self.metrics.load_state_dict(state_dict)

    def _report(self, trainer: pl.Trainer, window: StepWindow) -> None:
        """Logs the figures of a window."""
        now = time.perf_counter()
        seconds, self._window_begin = now - self._window_begin, now
        if not window.tells_loads:
            self._best_effort.say_once(
                "LoadBalanceMonitor found no `meta` with samples, sequence_length and loss_weight in the batch "
                "(VideoDataModule adds it): it logs balance/cv_step and time/... only."
            )
        figures = self._best_effort.attempt("compute its figures", self.metrics.update, window, seconds) or {}
        self._best_effort.log(trainer, figures)
        fields = {"balance/cv_step": "cv_step", "throughput/tokens_per_second": "tokens/s"}
        self._shown = {field: figures[name] for name, field in fields.items() if name in figures}
        if trainer.is_global_zero:
            self._best_effort.attempt("note what to draw", self._pictures.add, window, logged_step(trainer))
            if self._pictures.are_due:
                self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self._best_effort.attempt("draw", self._pictures.hand_to, trainer.loggers)
