"""Random numbers that are the same on every machine and for every release of numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SeededRandom:
    """A stream of random numbers that a few integers name.

    Only raw bits of the generator are used: their stream never changes, while numpy's distributions may.

    Args:
        *key: Non-negative integers, such as seed, epoch and window.
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def permutation(self, n: int) -> NDArray[np.int64]:
        """A uniformly random order of ``0 .. n - 1``."""
        return np.argsort(self._bits.random_raw(n), kind="stable")

    def uniform(self, n: int) -> NDArray[np.float64]:
        """``n`` numbers in [0, 1)."""
        raw: NDArray[np.uint64] = self._bits.random_raw(n)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
