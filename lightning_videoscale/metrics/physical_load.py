"""Physical load O: how much attention work the ranks are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.metrics.loads import loads_of
from lightning_videoscale.metrics.ratio import Ratio


class PhysicalLoad(Ratio):
    """O = B · S² of the data-parallel ranks: its mean, and the largest of any rank in any step.

    AdaptiveLoad's metric (section on metrics), for B samples of S tokens. `ComputeCV` says how unequal these loads are;
    their mean and maximum say how large.

    Example:
        >>> load = PhysicalLoad()
        >>> load.update(torch.tensor([4, 1]), torch.tensor([100, 400]))
        >>> {name: value.item() for name, value in load.compute().items()}
        {'mean': 100000.0, 'max': 160000.0}
    """

    sums = ("load_sum", "loads")
    higher_is_better = None

    load_sum: Tensor
    load_max: Tensor
    loads: Tensor

    def __init__(self, **kwargs: Any) -> None:
        """Creates an empty metric; see `Ratio` for ``kwargs``."""
        super().__init__(**kwargs)
        self.add_state("load_max", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, batch_sizes: Tensor, sequence_lengths: Tensor) -> None:
        """Adds one step, or several.

        Args:
            batch_sizes: Samples, as for `ComputeCV.update`.
            sequence_lengths: Tokens per sample, the same shape.

        Raises:
            ValueError: The shapes differ, have another number of dimensions or no element.
        """
        loads = loads_of(batch_sizes, sequence_lengths, p=2.0)
        self.load_sum += loads.sum()
        self.load_max = torch.maximum(self.load_max, loads.max())
        self.loads += loads.numel()

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Returns ``mean`` and ``max`` of B · S², float64 scalars; before the first step NaN and 0."""
        return {"mean": super().compute(), "max": self.load_max.clone()}
