"""Compute CV: how unequal the ranks' compute loads are, before any clock is read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.cost.spread import compute_cv
from lightning_videoscale.metrics.loads import loads_of
from lightning_videoscale.metrics.ratio import Ratio


class ComputeCV(Ratio):
    """Compute CV = std / mean over the data-parallel ranks of the load B * S**p, averaged over the steps.

    B is the number of samples of a micro-batch, S its sequence length in tokens. With p = 2 this is the paper's
    physical load (AdaptiveLoad, section on metrics); with a fitted p it follows the measured cost more closely. The
    standard deviation is that of a whole population, since every rank is seen, not a sample of them.

    Example:
        >>> cv = ComputeCV(p=2.0)
        >>> cv.update(torch.tensor([4, 1]), torch.tensor([100, 200]))  # both 40 000
        >>> cv.compute().item()
        0.0
    """

    sums = ("cv_sum", "steps")
    higher_is_better = False

    cv_sum: Tensor
    steps: Tensor

    def __init__(self, p: float = 2.0, **kwargs: Any) -> None:
        """Creates an empty metric.

        Args:
            p: Exponent of the sequence length in the load.
            **kwargs: See `Ratio`.
        """
        super().__init__(**kwargs)
        self.p = p

    def update(self, batch_sizes: Tensor, sequence_lengths: Tensor) -> None:
        """Adds one step, or several.

        Args:
            batch_sizes: Samples: of one step, shape ``(dp_ranks,)``, or ``(dp_ranks, micro_batches)`` where it
                accumulates several micro-batches: the loads of one rank add up. Of several steps, ``(dp_ranks, steps,
                micro_batches)``, where 0 fills up what a step has fewer of.
            sequence_lengths: Tokens per sample, the same shape.

        Raises:
            ValueError: The shapes differ or have another number of dimensions, or in a step no rank has any load.
        """
        loads = loads_of(batch_sizes, sequence_lengths, self.p)
        if not bool((loads.sum(dim=0) > 0).all()):
            raise ValueError(f"at least one rank must have a load above zero; got B * S**p = {loads.T.tolist()}.")
        self.cv_sum += compute_cv(loads).sum()
        self.steps += loads.shape[1]
