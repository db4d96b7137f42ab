"""How many samples of one sequence length make a micro-batch (AdaptiveLoad, equation 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BucketBudget:
    """The dual constraint of AdaptiveLoad: no micro-batch exceeds the memory or the compute of its budget.

    Args:
        m_mem: Memory budget M_mem in tokens: ``B * S`` stays at or below it.
        m_comp: Compute budget M_comp in tokens to the power ``p``: ``B * S**p`` stays at or below it. ``inf`` lets
            memory alone decide.
        p: How the time of a step grows with the sequence length S: 1 for the linear layers, 2 for full attention,
            a measured value in between.

    Raises:
        ValueError: If a budget is not positive, or ``p`` is not a positive number.
    """

    m_mem: float
    m_comp: float
    p: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("m_mem", self.m_mem), ("m_comp", self.m_comp), ("p", self.p)):
            if not value > 0 or (name != "m_comp" and math.isinf(value)):
                raise ValueError(f"BucketBudget({name}={value}): {name} must be a positive number.")

    def batch_size(self, sequence_length: int) -> int:
        """Returns B = max(1, min(⌊M_mem / S⌋, ⌊M_comp / S^p⌋)), equation 2 of the paper.

        Args:
            sequence_length: Tokens S of one sample, at least 1.
        """
        limits = (self.m_mem / sequence_length, self.m_comp / self.cost(1, sequence_length))
        return max(1, math.floor(min(limits)))

    def batch_sizes(self, sequence_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `batch_size` of every length, shape (lengths,)."""
        # Python's numbers: numpy's powers differ in the last bit between processors, and all ranks must agree.
        return np.array([self.batch_size(length) for length in sequence_lengths.tolist()], np.int64)

    def exceeds_memory(self, sequence_length: int) -> bool:
        """Whether one sample of this many tokens is already more than the memory budget."""
        return sequence_length > self.m_mem

    def cost(self, samples: int, sequence_length: int) -> float:
        """Predicted cost B * S^p of a micro-batch, in tokens to the power p."""
        return samples * math.pow(sequence_length, self.p)
