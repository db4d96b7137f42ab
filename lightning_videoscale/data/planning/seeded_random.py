"""Random numbers that are the same on every machine and for every release of numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAP = 1024
"""Numbers that are drawn in vain rather than passed over: this takes as long."""


class SeededRandom:
    """A stream of random numbers that a few integers name.

    Only raw bits of the generator are used: their stream never changes, while numpy's distributions may.

    Args:
        *key: Non-negative integers, such as seed, epoch and window.
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def raw_at(self, places: NDArray[np.int64], total: int) -> NDArray[np.uint64]:
        """Of the next ``total`` raw numbers those at some places, and no more of them in memory than that, about.

        Args:
            places: (n,) ascending, from 0 to ``total`` - 1.
            total: How many numbers are passed.
        """
        found, passed = [np.empty(0, np.uint64)], 0
        for run in runs(places):
            first, last = int(run[0]), int(run[-1]) + 1
            self._bits.advance(first - passed)
            found.append(self._bits.random_raw(last - first)[run - first])
            passed = last
        self._bits.advance(total - passed)
        return np.concatenate(found)

    def permutation(self, n: int) -> NDArray[np.int64]:
        """A uniformly random order of ``0 .. n - 1``."""
        return np.argsort(self._bits.random_raw(n), kind="stable")

    def uniform(self, n: int) -> NDArray[np.float64]:
        """``n`` numbers in [0, 1)."""
        return _uniform(self._bits.random_raw(n))

    def uniform_at(self, places: NDArray[np.int64], total: int) -> NDArray[np.float64]:
        """Of what ``uniform(total)`` returns the numbers at some ascending places, see `raw_at`."""
        return _uniform(self.raw_at(places, total))


class RandomOfRows:
    """Random numbers for rows (n,), ascending, of a table of ``total``: those that they have where all rows draw."""

    def __init__(self, draws: SeededRandom, rows: NDArray[np.int64], total: int) -> None:
        self._draws, self._rows, self._total = draws, rows, total

    def uniform(self, n: int) -> NDArray[np.float64]:
        """(n,) numbers in [0, 1), one for each row."""
        assert n == len(self._rows)
        return self._draws.uniform_at(self._rows, self._total)


def runs(ascending: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cuts ascending integers where they leave a gap that is not worth filling."""
    if not len(ascending):
        return []
    return np.split(ascending, np.flatnonzero(np.diff(ascending) > _GAP) + 1)


def _uniform(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
