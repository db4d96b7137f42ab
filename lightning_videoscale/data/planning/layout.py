"""Micro-batches with their places, and how long they are predicted to take.

`balanced` promises much for many micro-batches and nothing for a handful: in two or three steps its bands have no
company to offer, and an order drawn at random may be quicker by chance. So layouts of the same samples are compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_videoscale.cost.spread import compute_cv, cv_step
from lightning_videoscale.data.planning.batches import Batches

_DECIMALS = 9
"""Figures are compared rounded: the ranks' processors may round differently."""


class Arrangement(NamedTuple):
    """M micro-batches, those included that only fill slots, and who trains them when.

    Attributes:
        batches: The micro-batches.
        number: (M,) which of them each is: all, and then the one that fills.
        cost: (M,) predicted cost of each.
        grid: (steps, ranks, micro_batches) numbers from 0 to M - 1.
    """

    batches: Batches
    number: NDArray[np.int64]
    cost: NDArray[np.float64]
    grid: NDArray[np.int64]

    @property
    def filler(self) -> NDArray[np.bool_]:
        """(M,) whether each only fills a slot that would stay empty."""
        return np.arange(len(self.number)) >= len(self.batches.sizes)

    def seconds(self) -> tuple[float, float]:
        """Predicted cost of the epoch where ranks wait at the end of each step, and where at each micro-batch."""
        by_slot = self.cost[self.grid]
        return float(by_slot.sum(axis=2).max(axis=1).sum()), float(by_slot.max(axis=1).sum())

    def over(self, other: Arrangement) -> tuple[float, float]:
        """The same over those of another layout, rounded."""
        steps, slots = (
            round(own / others, _DECIMALS) for own, others in zip(self.seconds(), other.seconds(), strict=True)
        )
        return steps, slots

    def is_no_worse_than(self, other: Arrangement) -> bool:
        """Whether this is quicker; or takes as long, and its ranks cost as equally, the mean over the steps."""
        over = self.over(other)
        if max(over) > 1 or min(over) < 1:
            return max(over) <= 1
        return all(own <= others for own, others in zip(self._spreads(), other._spreads(), strict=True))

    def _spreads(self) -> tuple[float, float]:
        """Means over the steps of Compute CV and of CV_step of the ranks' cost, rounded."""
        by_rank = torch.from_numpy(self.cost[self.grid].sum(axis=2).T)
        mean_cv, mean_step = (round(float(spread(by_rank).mean()), _DECIMALS) for spread in (compute_cv, cv_step))
        return mean_cv, mean_step
