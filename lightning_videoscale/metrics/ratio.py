"""A sum over another sum: what most of the metrics are."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_videoscale.compat.torchmetrics import MetricOfFixedDtype


class Ratio(MetricOfFixedDtype):
    """One float64 sum over another, of everything seen; several processes, when synced, add up both.

    A subclass names its two states, and adds to them in its ``update``.
    """

    sums: ClassVar[tuple[str, str]]
    is_differentiable = False
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        """Creates an empty metric; ``**kwargs`` are `torchmetrics.Metric`'s own."""
        super().__init__(**kwargs)
        for name in self.sums:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Returns the ratio, a float64 scalar; NaN before the first update."""
        numerator, denominator = (getattr(self, name) for name in self.sums)
        ratio: Tensor = numerator / denominator
        return ratio
