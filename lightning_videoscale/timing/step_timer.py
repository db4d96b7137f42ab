"""Puts a clock on a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_videoscale.compat.lightning import FETCH_ACTION
from lightning_videoscale.compat.lightning.training_loop import waits_between_batches
from lightning_videoscale.compat.patching import patch
from lightning_videoscale.compat.torch.autograd import when_backward_ends
from lightning_videoscale.timing.clock import StepClock
from lightning_videoscale.timing.marks import marks_on
from lightning_videoscale.timing.step_times import StepTimes
from lightning_videoscale.timing.synchronization import synchronizing_calls


class StepTimer(pl.Callback):
    """The times of this rank's micro-batches from now on, by a clock with hooks into a Trainer.

    It is the first of the Trainer's callbacks, and the forward pass begins in the strategy's ``training_step``, so that
    the others' time is not the model's. It stays until it is closed, or ``fit`` ends or fails; what ended by then can
    still be read. Of several on one Trainer the last is closed first: callbacks share one, see `subscribe_to_steps`.

    Args:
        trainer: A Trainer whose model is wrapped: make this in ``on_fit_start``, ``on_train_start`` or later.

    Raises:
        RuntimeError: If the model is not wrapped yet, or a framework of a version that the clock does not know.
    """

    def __init__(self, trainer: Any) -> None:
        if trainer.strategy.model is None:
            raise RuntimeError("The clock needs the wrapped model: put it on in on_fit_start, or later.")
        self._trainer = trainer
        self._clock = StepClock(marks_on(trainer.strategy.root_device))
        self._undo: list[Callable[[], None]] = []
        self._is_in_step = False
        for owner, name, phase in synchronizing_calls(trainer.strategy):
            self._replace(owner, name, partial(self._clock.timing, phase=phase))
        self._replace(trainer.profiler, "start", self._noting_fetches)
        self._replace(trainer.profiler, "stop", self._noting_fetched)
        for owner, name in waits_between_batches(trainer):
            self._replace(owner, name, partial(self._clock.timing, phase="wait", within=["other"]))
        self._replace(trainer.strategy, "training_step", self._beginning)
        self._replace(trainer.strategy, "optimizer_step", self._timing_steps)
        clipping = partial(self._clock.timing, phase="optimizer", within=["forward"])
        self._replace(trainer.precision_plugin, "clip_gradients", clipping)
        # A new list: the old one is being iterated over.
        trainer.callbacks = [self, *trainer.callbacks]

    def read(self) -> list[StepTimes]:
        """Returns the micro-batches that ended since the last call, in order; waits for the device to have done them.

        Meant for reports every so many steps. In ``on_train_batch_end`` the micro-batch that ends is among them.
        """
        return self._clock.read()

    def close(self) -> None:
        """Takes the clock off the Trainer. Closing twice is closing once."""
        while self._undo:
            self._undo.pop()()
        self._trainer.callbacks = [callback for callback in self._trainer.callbacks if callback is not self]

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Puts what is made of a method in its place, until the clock is taken off."""
        self._undo.append(patch(owner, name, make(getattr(owner, name))))

    def _noting_fetches(self, start: Callable[[str], None]) -> Callable[[str], None]:
        @wraps(start)
        def noting(action_name: str) -> None:
            if action_name == FETCH_ACTION:
                self._clock.enter("data")
            start(action_name)

        return noting

    def _noting_fetched(self, stop: Callable[[str], None]) -> Callable[[str], None]:
        @wraps(stop)
        def noting(action_name: str) -> None:
            stop(action_name)
            if action_name == FETCH_ACTION and self._is_in_step:  # a ``training_step`` that takes the iterator
                self._clock.enter("forward")

        return noting

    def _beginning(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(training_step)
        def beginning(*args: Any, **kwargs: Any) -> Any:
            self._clock.enter("forward")
            self._is_in_step = True
            try:
                output = training_step(*args, **kwargs)
            finally:
                self._is_in_step = False
            if output is None and self._trainer.lightning_module.automatic_optimization:
                self._clock.enter("optimizer")  # no backward pass will say so
            return output

        return beginning

    def _timing_steps(self, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        """Steps that are taken within ``training_step``; their closures are passes of the networks."""

        @wraps(optimizer_step)
        def stepping(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            passes = self._clock.timing(closure, "forward", within=["optimizer"])
            return optimizer_step(optimizer, passes, *args, **kwargs)

        return self._clock.timing(stepping, "optimizer", within=["forward"])

    # -- the Trainer's hooks, in their order -----------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._clock.enter("other")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._clock.enter("backward")
        if loss.requires_grad:
            loss.register_hook(self._on_backward_begins)

    def _on_backward_begins(self, gradient: Tensor) -> None:
        # Queued before DDP, FSDP2 and ZeRO queue what waits for their reductions: it runs before them, and after the
        # last gradient.
        when_backward_ends(lambda: self._clock.enter("wait"))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In manual optimization other passes may follow; the calls that clip and step are timed.
        self._clock.enter("optimizer" if pl_module.automatic_optimization else "forward")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._clock.end_micro_batch()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A loader that is shorter than it says was asked for a batch that no start of a batch follows.
        self._clock.enter("other")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()
