"""The one log of a Trainer's steps: every rank's micro-batches, gathered at intervals for all who subscribe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_videoscale.timing.load import MicroBatchLoad, load_of
from lightning_videoscale.timing.step_timer import StepTimer
from lightning_videoscale.timing.step_window import FIELDS, StepWindow
from lightning_videoscale.topology import topology_of, waits_in_every_micro_batch

_STEPS_WITHOUT_LOGGING = 50


def check_interval(every_n_steps: int | None) -> int | None:
    """Returns a number of steps.

    Raises:
        ValueError: It is below 1, or not whole.
    """
    if every_n_steps is not None and (every_n_steps < 1 or every_n_steps % 1):
        raise ValueError(f"every_n_steps must be a whole number of at least 1, or None; got {every_n_steps}.")
    return every_n_steps


@dataclass
class _Subscriber:
    interval: int
    receive: Callable[[StepWindow], None]
    add: Callable[[], Sequence[float]]
    begin: int
    """Number of the first step of its next window."""


def subscribe_to_steps(
    trainer: pl.Trainer,
    every_n_steps: int | None,
    receive: Callable[[StepWindow], None],
    *,
    skip: int = 0,
    add: Callable[[], Sequence[float]] = tuple,
) -> None:
    """Hands over what all ranks did, every few optimizer steps, and what is left when training ends.

    To be called by all ranks alike, in ``on_train_start``. The ranks gather once for all subscribers whose windows end
    with a step, and every rank receives the whole window, before the other callbacks' ``on_train_batch_end`` or
    ``on_train_end``.

    Args:
        trainer: The Trainer.
        every_n_steps: Optimizer steps of a window; None: the Trainer's ``log_every_n_steps``, or 50 if that is 0.
        receive: Takes a window. It runs on every rank in the same order, so that it may call collectives. What it
            raises ends the training.
        skip: Steps before the first window.
        add: Returns what this rank adds to the gather, equally many numbers on all ranks at all times.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    log = next((callback for callback in callbacks if isinstance(callback, _StepLog)), None) or _StepLog(trainer)
    log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    interval = every_n_steps or log_every_n_steps or _STEPS_WITHOUT_LOGGING
    log.subscribers.append(_Subscriber(interval, receive, add, log.end + skip))


class _StepLog(StepTimer):
    """A timer that keeps, beside the times, what the micro-batches were, and brings both together with other ranks'."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.subscribers: list[_Subscriber] = []
        self._dp_rank = topology_of(trainer).data_parallel_rank
        self._in_slots = waits_in_every_micro_batch(trainer)
        self._global_step = trainer.global_step
        # Complete steps that a subscriber waits for: number of the first, micro-batches of each, and all ranks' rows of
        # those that were gathered. Of the others, complete or not, there are this rank's loads.
        self._first = 0
        self._micro_batches: list[int] = []
        self._table = torch.zeros(trainer.world_size, 0, len(FIELDS), dtype=torch.float64)
        self._loads: list[MicroBatchLoad] = []

    @property
    def end(self) -> int:
        """Number of the step under way."""
        return self._first + len(self._micro_batches)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._loads.append(load_of(batch) or MicroBatchLoad())
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._micro_batches.append(self._table.shape[1] + len(self._loads) - sum(self._micro_batches))
            self._hand_over(trainer, [one for one in self.subscribers if self.end - one.begin >= one.interval])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hand_over(trainer, [one for one in self.subscribers if self.end > one.begin])
        self.close()

    def _hand_over(self, trainer: pl.Trainer, due: list[_Subscriber]) -> None:
        if not due:
            return
        dp_ranks, values = self._gather(trainer, [list(one.add()) for one in due])
        for one, added in zip(due, values, strict=True):
            before = one.begin - self._first
            rows = self._table[:, sum(self._micro_batches[:before]) :]
            one.begin = self.end
            one.receive(StepWindow(dp_ranks, rows, self._micro_batches[before:], added, self._in_slots))
        self._forget(min(one.begin for one in self.subscribers))

    def _gather(self, trainer: pl.Trainer, values: list[list[float]]) -> tuple[list[int], Sequence[Tensor]]:
        """Adds the rows of all ranks to the table; returns the data-parallel rank of each, and the values of each."""
        count = sum(self._micro_batches) - self._table.shape[1]
        loads, self._loads = self._loads[:count], self._loads[count:]
        rows = [(*times, *load) for times, load in zip(self.read()[:count], loads, strict=True)]
        ranks = torch.tensor([[self._dp_rank, *chain(*rows), *chain(*values)]], dtype=torch.float64)
        if trainer.world_size > 1:
            ranks = trainer.strategy.all_gather(ranks[0].to(trainer.strategy.root_device)).cpu()
        dp_ranks, table, *added = ranks.split([1, count * len(FIELDS), *map(len, values)], dim=1)
        self._table = torch.cat([self._table, table.unflatten(1, (count, len(FIELDS)))], dim=1)
        return dp_ranks[:, 0].long().tolist(), added

    def _forget(self, first: int) -> None:
        """Drops the steps before one, which nobody waits for."""
        gone = self._micro_batches[: first - self._first]
        self._table = self._table[:, sum(gone) :].clone()
        self._micro_batches = self._micro_batches[len(gone) :]
        self._first += len(gone)
