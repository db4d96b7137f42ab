"""What all parts of our strategies know of the Lightning strategy that they come before: `StrategyPart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Parent
else:
    _Parent = object


class StrategyPart(_Parent):
    """Goes before a Lightning strategy in the bases of a class."""

    @property
    def _module(self) -> pl.LightningModule:
        """The LightningModule, which is there from the strategy's setup on."""
        assert self.lightning_module is not None
        return self.lightning_module
