"""How much memory a micro-batch takes, and so how many tokens fit: M_mem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.points import nonnegative_least_squares


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes = fixed + per_token * B * S.

    Attributes:
        fixed: Bytes without any token: weights, gradients, optimizer states, buffers.
        per_token: Bytes of activations per token.
        worst_excess: Largest relative excess of a measured peak over the prediction, at or above 0.
    """

    fixed: float
    per_token: float
    worst_excess: float

    @classmethod
    def fit(cls, samples: Sequence[Measurement]) -> MemoryModel:
        """Fits measured peaks, on relative error.

        Args:
            samples: Measured shapes; those without a peak are left out.

        Raises:
            ValueError: If fewer than 3 have a peak, or all have equally many tokens.
        """
        peaks = [(m.samples * m.sequence_length, m.peak_bytes) for m in samples if m.peak_bytes is not None]
        if len(peaks) < 3 or len({tokens for tokens, _ in peaks}) < 2:
            raise ValueError(f"A memory model needs 3 measured peaks of 2 token counts; got {len(peaks)}.")
        tokens, measured = (np.array(column, np.float64) for column in zip(*peaks, strict=True))
        terms = np.stack([np.ones_like(tokens), tokens], axis=1)
        fixed, per_token = map(float, nonnegative_least_squares(terms / measured[:, None], np.ones_like(measured)))
        if per_token <= 0:
            raise ValueError(f"The measured peaks do not grow with the tokens ({peaks}); measure larger shapes.")
        excess = float(np.max(measured / (fixed + per_token * tokens) - 1))
        return cls(fixed, per_token, max(0.0, excess))

    def predict(self, samples: int, sequence_length: int) -> float:
        """Peak bytes of B samples of S tokens."""
        return self.fixed + self.per_token * samples * sequence_length

    def m_mem(self, capacity_bytes: float, reserve: float = 0.05) -> int:
        """Tokens that a micro-batch may have: M_mem.

        Args:
            capacity_bytes: Memory of the device.
            reserve: Share of it that is kept free, on top of the fit's own worst excess.

        Raises:
            ValueError: If not even one token fits.
        """
        tokens = self.fits(capacity_bytes, reserve)
        if tokens < 1:
            raise ValueError(
                f"Of {capacity_bytes / 2**30:.1f} GiB, {self.fixed / 2**30:.1f} are taken before the first token: "
                "shard the states over more ranks, checkpoint activations, or use a larger sequence-parallel group."
            )
        return tokens

    def fits(self, capacity_bytes: float, reserve: float = 0.05) -> int:
        """As `m_mem`, and 0 where not even one token fits."""
        usable = capacity_bytes * (1 - reserve) / (1 + self.worst_excess)
        return max(0, int((usable - self.fixed) // self.per_token))
