"""Puts one clock on a Trainer, for all who want to read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.autograd import Variable

from lightning_videoscale.timing.clock import StepClock, StepWatch
from lightning_videoscale.timing.marks import marks_on
from lightning_videoscale.timing.synchronization import synchronizing_calls

_FETCHING = "[_TrainingEpochLoop].train_dataloader_next"
"""What Lightning's training loop tells the profiler before it asks the loader for a batch."""


def watch_steps(trainer: pl.Trainer) -> StepWatch:
    """Returns a reader of the times of this rank's micro-batches from now on.

    All readers of a Trainer share one clock. It comes with the first and goes with the last, or when ``fit`` ends or
    fails; what it has read by then can still be read.

    Args:
        trainer: A Trainer whose model is wrapped: call this in ``on_fit_start``, ``on_train_start`` or later.

    Raises:
        RuntimeError: If the model is not wrapped yet, or a framework of a version that the clock does not know.
    """
    return clock_on(trainer).watch()


def clock_on(trainer: pl.Trainer) -> _Attachment:
    """Returns the Trainer's clock, which it puts there if none is; see `watch_steps`."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if trainer.strategy.model is None:
        raise RuntimeError("The clock needs the wrapped model: call watch_steps in on_fit_start, or later.")
    attached = next((callback for callback in callbacks if isinstance(callback, _Attachment)), None)
    return _Attachment(trainer) if attached is None else attached


class _Attachment(pl.Callback):
    """The clock's hooks into a Trainer, first of its callbacks, so that the others' time is not the model's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._clock = StepClock(marks_on(trainer.strategy.root_device))
        self._undo: list[Callable[[], None]] = []
        for owner, name, phase in synchronizing_calls(trainer.strategy):
            self._replace(owner, name, self._clock.timing(getattr(owner, name), phase))
        self._replace(trainer.profiler, "start", self._noting_fetches(trainer.profiler.start))
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # before every micro-batch, ranks wait for rank 0
            call = self._clock.timing(loop._broadcast_sigterm_tensor, "wait", within=["other"])
            self._replace(loop, "_broadcast_sigterm_tensor", call)
        # A new list: the old one is being iterated over.
        trainer.callbacks = [self, *trainer.callbacks]

    def watch(self) -> StepWatch:
        """Returns a new reader."""
        return self._clock.watch(on_close=self._close_unless_watched)

    def put_behind(self, callback: pl.Callback) -> None:
        """Makes a callback the next one: each of its hooks runs right after the clock's."""
        behind = self._trainer.callbacks.index(self) + 1
        self._trainer.callbacks = [*self._trainer.callbacks[:behind], callback, *self._trainer.callbacks[behind:]]

    def _close_unless_watched(self) -> None:
        if not self._clock.watched:
            self._close()

    def _close(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._trainer.callbacks = [callback for callback in self._trainer.callbacks if callback is not self]

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Puts a call in front of a method, on this one object."""
        before = vars(owner).get(name)
        setattr(owner, name, call)

        def undo() -> None:
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)

        self._undo.append(undo)

    def _noting_fetches(self, start: Callable[[str], None]) -> Callable[[str], None]:
        @wraps(start)
        def noting(action_name: str) -> None:
            if action_name == _FETCHING:
                self._clock.enter("data")
            start(action_name)

        return noting

    # -- the Trainer's hooks, in their order -----------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._clock.enter("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._clock.enter("backward")
        if loss.requires_grad:
            loss.register_hook(self._on_backward_begins)

    def _on_backward_begins(self, gradient: Tensor) -> None:
        # Queued before DDP, FSDP2 and ZeRO queue what waits for their reductions: it runs before them, and after the
        # last gradient.
        Variable._execution_engine.queue_callback(lambda: self._clock.enter("wait"))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.enter("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._clock.end_micro_batch()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()
