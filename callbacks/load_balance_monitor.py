"""Watches how evenly the ranks are loaded, and how fast they are together."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_videoscale.callbacks.batch_load import load_of
from lightning_videoscale.callbacks.forward_clock import ForwardClock
from lightning_videoscale.metrics import ComputeCV, StepTimeSpread
from lightning_videoscale.topology import topology_of

_STEPS_BETWEEN_REPORTS_WITHOUT_LOGGING = 50


class LoadBalanceMonitor(pl.Callback):
    """Logs how evenly the ranks are loaded, and how fast they are together.

    Every few optimizer steps it logs the mean over those steps of

    - ``balance/cv_step``: (max - min) / max of the data-parallel ranks' forward times (`StepTimeSpread`);
    - ``balance/compute_cv``: std / mean of their loads B * S**p (`ComputeCV`);
    - ``throughput/tokens_per_second`` and ``throughput/samples_per_second`` of all ranks together, a sequence-parallel
      group counted once, fillers not at all, validation not timed;

    to every logger, and ``cv_step`` and ``tokens/s`` to the progress bar. `summary` gives the same for the whole run.

    The time of a rank is that of its forward pass, from the start of the batch to just before backward. Backward is
    left out on purpose: under DDP it contains the waiting for the slowest rank, which would make all ranks look alike.
    Where the forward pass itself communicates it contains waiting too: inside a sequence-parallel group (whose time is
    that of its slowest rank), in FSDP's gathering of parameters, in DDP's broadcast of buffers. An optimizer step
    counts the sum over its accumulated micro-batches. On a GPU the time is read from CUDA events without stopping the
    device.

    Ranks meet once per report, in one float64 gather. Nothing that goes wrong in computing or logging the figures stops
    the training: it is reported once. Batches without a ``meta`` (see `VideoDataModule`) leave only
    ``balance/cv_step``, which is said once.

    Attributes:
        step_time_spread: CV_step over the run so far.
        compute_cv: Compute CV over the run so far.
        samples: Samples seen so far by all ranks.
        tokens: Tokens seen so far by all ranks.
        seconds: Wall time of the reported steps, in seconds.
    """

    def __init__(self, every_n_steps: int | None = None, p: float = 2.0) -> None:
        """Creates the monitor.

        Args:
            every_n_steps: Optimizer steps from report to report; None takes the Trainer's ``log_every_n_steps``.
            p: Exponent of the sequence length in the load B * S**p.

        Raises:
            ValueError: ``every_n_steps`` is below 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, or None; got {every_n_steps}.")
        self.every_n_steps = every_n_steps
        # Every rank updates with all ranks' figures, so a sync would only cost a collective.
        self.step_time_spread = StepTimeSpread(sync_on_compute=False)
        self.compute_cv = ComputeCV(p, sync_on_compute=False)
        self.samples = 0
        self.tokens = 0
        self.seconds = 0.0
        self._said: set[str] = set()

    def summary(self) -> dict[str, float]:
        """Returns the figures of the run so far: cv_step, compute_cv, tokens_per_second, samples, tokens.

        A figure that was never known (no ``meta`` in the batches, no step yet) is left out.
        """
        figures: dict[str, float] = {}
        if self.step_time_spread.steps > 0:
            figures["cv_step"] = self.step_time_spread.compute().item()
        if self.compute_cv.steps > 0:
            figures["compute_cv"] = self.compute_cv.compute().item()
            figures["tokens_per_second"] = self.tokens / self.seconds
            figures["samples"] = self.samples
            figures["tokens"] = self.tokens
        return figures

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the first window."""
        log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        self._interval = self.every_n_steps or log_every_n_steps or _STEPS_BETWEEN_REPORTS_WITHOUT_LOGGING
        self._clock = ForwardClock(trainer.strategy.root_device)
        self._global_step = trainer.global_step
        self._window_begin = time.perf_counter()
        self._loads: list[tuple[float, float, float]] = []
        self._micro_batches_of_step: list[int] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock."""
        self._clock.start()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Stops the clock."""
        self._clock.stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the micro-batch's load, and reports when enough optimizer steps are complete."""
        self._clock.stop()
        self._loads.append(self._load(batch))
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._micro_batches_of_step.append(len(self._loads) - sum(self._micro_batches_of_step))
        if len(self._micro_batches_of_step) >= self._interval:
            figures = self._close_window(trainer)
            self._log(trainer, figures)
            self._show(pl_module, figures)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops counting wall time."""
        self._validation_begin = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Goes on counting wall time."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._window_begin += time.perf_counter() - self._validation_begin

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports the steps since the last report."""
        if self._micro_batches_of_step:
            self._log(trainer, self._close_window(trainer))

    def _load(self, batch: object) -> tuple[float, float, float]:
        """Returns B, S and whether the samples count (1) or fill up (0); zeros where the batch does not tell."""
        load = load_of(batch)
        if load is None:
            self._say_once(
                "LoadBalanceMonitor found no `meta` with samples, sequence_length and loss_weight in the batch "
                "(VideoDataModule adds it): it logs balance/cv_step only."
            )
            return 0.0, 0.0, 0.0
        return float(load.samples), float(load.sequence_length), float(load.loss_weight != 0.0)

    def _close_window(self, trainer: pl.Trainer) -> dict[str, float]:
        """Gathers the window from all ranks and returns its figures."""
        steps, self._micro_batches_of_step = self._micro_batches_of_step, []
        loads, self._loads = self._loads, []
        times = self._clock.drain()
        now = time.perf_counter()
        seconds, self._window_begin = now - self._window_begin, now

        # The gather stays outside the guard below: a rank that skipped it would leave the others waiting.
        topology = topology_of(trainer)
        rows = [(topology.data_parallel_rank, t, *load) for t, load in zip(times, loads, strict=True)][: sum(steps)]
        everything = _gather(trainer, torch.tensor(rows, dtype=torch.float64))
        try:
            return self._figures(everything, steps, seconds)
        except Exception as error:
            self._say_once(f"LoadBalanceMonitor could not compute its figures, training goes on: {error!r}")
            return {}

    def _figures(self, everything: Tensor, steps: list[int], seconds: float) -> dict[str, float]:
        """Returns one window's figures, from all ranks' rows (ranks, micro_batches, 5), and adds them to the run's."""
        times, batch_sizes, lengths, counts = fold_sequence_parallel_peers(everything)
        spreads = [self.step_time_spread(part.sum(dim=1)) for part in times.split(steps, dim=1)]
        figures = {"balance/cv_step": float(torch.stack(spreads).mean())}
        if bool((batch_sizes > 0).all()):
            parts = zip(batch_sizes.split(steps, dim=1), lengths.split(steps, dim=1), strict=True)
            cvs = [self.compute_cv(part, part_lengths) for part, part_lengths in parts]
            samples, tokens = int((batch_sizes * counts).sum()), int((batch_sizes * lengths * counts).sum())
            self.samples += samples
            self.tokens += tokens
            self.seconds += seconds
            figures["balance/compute_cv"] = float(torch.stack(cvs).mean())
            figures["throughput/tokens_per_second"] = tokens / seconds
            figures["throughput/samples_per_second"] = samples / seconds
        return figures

    def _log(self, trainer: pl.Trainer, figures: dict[str, float]) -> None:
        try:
            for logger in trainer.loggers:
                # `self.log` numbers the steps from 0 too, so that the curves line up.
                logger.log_metrics(figures, step=trainer.global_step - 1)
        except Exception as error:
            self._say_once(f"LoadBalanceMonitor could not log, training goes on: {error!r}")

    def _show(self, pl_module: pl.LightningModule, figures: dict[str, float]) -> None:
        fields = {"balance/cv_step": "cv_step", "throughput/tokens_per_second": "tokens/s"}
        shown = {field: figures[name] for name, field in fields.items() if name in figures}
        pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            rank_zero_warn(message)


def _gather(trainer: pl.Trainer, rows: Tensor) -> Tensor:
    """Returns every rank's rows on the host, shape (ranks, *rows.shape)."""
    if trainer.world_size == 1:
        return rows[None]
    gathered = trainer.strategy.all_gather(rows.to(trainer.strategy.root_device))
    return gathered.cpu()


def fold_sequence_parallel_peers(everything: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduces what all ranks report to one row per data-parallel rank.

    Args:
        everything: Shape ``(ranks, micro_batches, 5)``; the last dimension holds data-parallel rank, seconds, B, S and
            whether the samples count.

    Returns:
        Seconds of the slowest peer, B, S, and the count flags (those of the first peer, as all peers work on one
        batch), each of shape ``(dp_ranks, micro_batches)``.
    """
    dp_rank_of = everything[:, 0, 0].tolist()
    groups = [[r for r, dp in enumerate(dp_rank_of) if dp == wanted] for wanted in sorted(set(dp_rank_of))]
    seconds = torch.stack([everything[group, :, 1].amax(dim=0) for group in groups])
    batch_sizes, lengths, counts = everything[[group[0] for group in groups], :, 2:].unbind(dim=-1)
    return seconds, batch_sizes, lengths, counts
