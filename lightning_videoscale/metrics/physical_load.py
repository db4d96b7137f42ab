"""Physical load O: how much attention work the ranks are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class PhysicalLoad(Metric):
    """O = B · S² of the data-parallel ranks: its mean, and the largest of any rank in any step.

    AdaptiveLoad's metric (section on metrics), for B samples of S tokens. `ComputeCV` says how unequal these loads are;
    their mean and maximum say how large.

    Example:
        >>> load = PhysicalLoad()
        >>> load.update(torch.tensor([4, 1]), torch.tensor([100, 400]))
        >>> {name: value.item() for name, value in load.compute().items()}
        {'mean': 100000.0, 'max': 160000.0}
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    load_sum: Tensor
    load_max: Tensor
    loads: Tensor

    def __init__(self, **kwargs: Any) -> None:
        """Creates an empty metric.

        Args:
            **kwargs: `torchmetrics.Metric`'s own arguments (``sync_on_compute``, ``process_group``, ...).
        """
        super().__init__(**kwargs)
        self.add_state("load_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("load_max", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("loads", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, batch_sizes: Tensor, sequence_lengths: Tensor) -> None:
        """Adds one step.

        Args:
            batch_sizes: Samples, shape ``(dp_ranks,)``, or ``(dp_ranks, micro_batches)`` where a step accumulates
                several micro-batches: the loads of one rank add up.
            sequence_lengths: Tokens per sample, the same shape.

        Raises:
            ValueError: The shapes differ, have another number of dimensions or no element.
        """
        if batch_sizes.shape != sequence_lengths.shape or batch_sizes.ndim not in (1, 2) or batch_sizes.numel() == 0:
            raise ValueError(
                "batch_sizes and sequence_lengths must both have shape (dp_ranks,) or (dp_ranks, micro_batches); "
                f"got {tuple(batch_sizes.shape)} and {tuple(sequence_lengths.shape)}."
            )
        loads = batch_sizes.double() * sequence_lengths.double() ** 2
        loads = loads.reshape(loads.shape[0], -1).sum(dim=1)
        self.load_sum += loads.sum()
        self.load_max = torch.maximum(self.load_max, loads.max())
        self.loads += len(loads)

    def compute(self) -> dict[str, Tensor]:
        """Returns ``mean`` and ``max`` of B · S², float64 scalars; before the first step NaN and 0."""
        return {"mean": self.load_sum / self.loads, "max": self.load_max.clone()}
