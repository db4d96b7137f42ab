"""A sum over another sum: what most of the metrics are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Ratio(Metric):
    """One float64 sum over another, of everything seen; several processes, when synced, add up both.

    A subclass adds to the two sums in its ``update``.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, numerator: str, denominator: str, **kwargs: Any) -> None:
        """Creates an empty metric.

        Args:
            numerator: Name of the state that is the one sum.
            denominator: Likewise of the other.
            **kwargs: `torchmetrics.Metric`'s own arguments (``sync_on_compute``, ``process_group``, ...).
        """
        super().__init__(**kwargs)
        self._sums = numerator, denominator
        for name in self._sums:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Returns the ratio, a float64 scalar; NaN before the first update."""
        numerator, denominator = (getattr(self, name) for name in self._sums)
        ratio: Tensor = numerator / denominator
        return ratio
