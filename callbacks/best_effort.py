"""Keeps what a callback does on the side from stopping the training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.compat.lightning.training_loop import logged_step

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class BestEffort:
    """Says what went wrong, once and in its owner's name, and lets the training go on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: set[str] = set()

    def attempt(
        self,
        what: str,
        act: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result | None:
        """Returns what ``act`` returns, or None where it failed; ``what`` completes "could not".

        No collective belongs in here: a rank that fails leaves it out.
        """
        try:
            return act(*args, **kwargs)
        except Exception as error:
            if what not in self._said:
                self._said.add(what)
                # Not from rank zero only: this may fail on one other rank alone.
                warnings.warn(f"{self._name} could not {what}, training goes on: {error!r}", stacklevel=2)
            return None

    def log(self, trainer: pl.Trainer, figures: Mapping[str, float]) -> None:
        """Hands figures to every logger; where one fails, the others have theirs."""
        step = logged_step(trainer)  # that of `self.log`, so that the curves line up
        for logger in trainer.loggers:
            self.attempt(f"log to {type(logger).__name__}", logger.log_metrics, dict(figures), step=step)

    def say_once(self, message: str) -> None:
        """Warns, from rank zero, unless this was said before."""
        if message not in self._said:
            self._said.add(message)
            rank_zero_warn(message)
