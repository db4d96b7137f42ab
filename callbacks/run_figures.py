"""Figures that callbacks keep of one run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl


class RunFigures(pl.Callback, ABC):
    """A callback that keeps figures of a run, over its restarts and for as long as nobody fits anew.

    Lightning restores callbacks in ``validate`` and ``test`` too: there the figures stay those of the run that was
    trained, whatever checkpoint is looked at.
    """

    _has_fitted = False
    _is_restored = True  # what is loaded counts; also by hand, before there is a Trainer

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begins anew in another fit. A Trainer that fits again goes on; what is resumed is loaded after this."""
        self._is_restored = stage == "fit"
        if stage == "fit":
            if self._has_fitted and trainer.global_step == 0:
                self._begin_anew()
            self._has_fitted = True

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from the figures of a run that is resumed."""
        if self._is_restored:
            self._go_on(state_dict)

    @abstractmethod
    def _begin_anew(self) -> None:
        """Forgets the figures so far."""

    @abstractmethod
    def _go_on(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the figures of a checkpoint."""
