"""CV_step: how far the slowest rank is from the fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.cost.spread import cv_step
from lightning_videoscale.metrics.ratio import Ratio


class StepTimeSpread(Ratio):
    """CV_step = (max - min) / max over the ranks, averaged over the steps (AdaptiveLoad, section on metrics).

    0 means that all ranks need the same time; 0.5 that the fastest rank idles for half of each step. The paper writes
    the same formula with sequence lengths; any positive load can stand in for the time.

    Every process is expected to see the times of *all* ranks, so that syncing averages equal values. A process that
    sees its own steps only may still update with them: syncing then averages over all steps seen anywhere.

    Example:
        >>> spread = StepTimeSpread()
        >>> spread.update(torch.tensor([1.0, 0.8]))
        >>> spread.update(torch.tensor([1.0, 0.6]))
        >>> round(spread.compute().item(), 6)
        0.3
    """

    sums = ("spread_sum", "steps")
    higher_is_better = False

    spread_sum: Tensor
    steps: Tensor

    def update(self, times: Tensor) -> None:
        """Adds one step, or several.

        Args:
            times: What each rank needed, shape ``(ranks,)``, or ``(ranks, steps)``; any unit, all above zero.

        Raises:
            ValueError: ``times`` has another number of dimensions, no element, or one that is not positive and finite.
        """
        if times.ndim not in (1, 2) or times.numel() == 0:
            raise ValueError(
                "times must have shape (ranks,), one value per rank, or (ranks, steps); "
                f"got shape {tuple(times.shape)}."
            )
        if not bool((torch.isfinite(times) & (times > 0)).all()):
            raise ValueError(f"times must be positive and finite; got {times.tolist()}.")
        spread = cv_step(times.detach().double())
        self.spread_sum += spread.sum()
        self.steps += spread.numel()
