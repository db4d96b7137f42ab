"""Checkpoints that callbacks would save after an exception, where several ranks train: `leave_out_after_exceptions`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.undo import Undo


def leave_out_after_exceptions(trainer: pl.Trainer) -> Undo:
    """Has no callback begin a checkpoint after an exception, and says so; returns what takes it back.

    All ranks write a checkpoint together. Where one has failed, the others are anywhere in their step: they would never
    come, the failed one would wait for them, and nobody would hear of its error.
    """
    undo = Undo()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if _saves_on_exception(callback):
            name = type(callback).__name__
            name += "(save_on_exception=True)" if isinstance(callback, ModelCheckpoint) else ""
            rank_zero_warn(
                f"{name} saves nothing after an error here: {trainer.world_size} ranks write a checkpoint together, "
                "and after an error on one of them the others do not come. Save every so many steps, by "
                "ModelCheckpoint(every_n_train_steps=...). On SIGTERM all ranks save as ever."
            )
            undo.set(callback, "on_exception", _save_nothing)
    return undo


def _saves_on_exception(callback: pl.Callback) -> bool:
    if isinstance(callback, ModelCheckpoint):
        return bool(getattr(callback, "save_on_exception", False))
    return isinstance(callback, OnExceptionCheckpoint)


def _save_nothing(*_: Any, **__: Any) -> None:
    """In the place of ``Callback.on_exception``."""
