"""All that ``fit`` sets up and tears down, and something else in the place of the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.compat.patching import patch


def within_fit(
    trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule | None, run: Callable[[], None]
) -> None:
    """Calls ``run`` where ``trainer.fit`` would train; loggers and checkpoint callbacks rest.

    Args:
        trainer: A Trainer that has not begun.
        module: What it would train.
        data: On which; None: on nothing.
        run: Called when all is set up. What fails in a callback's ``on_fit_end`` afterwards is a warning.
    """
    callbacks, loggers = trainer.callbacks, trainer.loggers  # type: ignore[attr-defined]
    sanity_steps = trainer.num_sanity_val_steps
    active = [c for c in callbacks if not isinstance(c, Checkpoint)]
    with ExitStack() as undo:
        for callback in active:
            undo.callback(patch(callback, "on_fit_end", partial(_without_training, callback.on_fit_end)))
        undo.callback(patch(trainer.fit_loop, "run", run))
        trainer.callbacks = active  # type: ignore[attr-defined]
        trainer.loggers, trainer.num_sanity_val_steps = [], 0
        try:
            trainer.fit(module, train_dataloaders=[] if data is None else None, datamodule=data)
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
            trainer.num_sanity_val_steps = sanity_steps


def _without_training(on_fit_end: Callable[..., None], *arguments: Any) -> None:
    """Calls what ends a callback's work. If it sums up a training it fails, since there was none."""
    try:
        on_fit_end(*arguments)
    except Exception as error:
        rank_zero_warn(f"{on_fit_end} failed after the benchmark, in which nothing is trained: {error!r}")
