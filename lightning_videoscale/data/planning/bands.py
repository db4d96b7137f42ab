"""Where micro-batches that are sorted by cost are cut into bands, such that the ranks of a row wait little.

The R micro-batches of a row are random ones of its band, and all R ranks wait for the costliest. What that costs is
predicted for every band that there may be, and the cuts with the least sum are found by dynamic programming. They leave
costs together that are nearly equal, however many they are, and divide those that are far apart.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_PLACES = 256  # cuts are tried at so many places evenly apart in the order, and at as many evenly apart in cost
_NODES = 24  # by which the mean of the costliest of a row is integrated


class BandCuts:
    """See the module's docstring. Cuts are rows, rising: where bands begin, with the end of the last.

    Args:
        cost: (M,) costs of the micro-batches, above zero and falling; M is a multiple of ``dp_size``.
        dp_size: Data-parallel ranks R.
        least: Micro-batches that a band has at least.
    """

    def __init__(self, cost: NDArray[np.float64], dp_size: int, least: float) -> None:
        rows, self._least_rows = len(cost) // dp_size, max(1, math.ceil(least / dp_size))
        self._places = _places(cost[::dp_size])
        size = self._places[:, None] - self._places  # in rows, by the end of a band and its beginning
        possible = size >= self._least_rows
        smallest = possible & (np.arange(len(size))[:, None] == possible.argmax(axis=0))
        # Where behind the smallest no other has room, all that is left.
        smallest[-1] |= possible[-1] & (size[-1] - (smallest * size).sum(axis=0) < self._least_rows)
        smallest[-1, 0] |= not possible.any()
        self._smallest = smallest
        ends, begins = (possible | smallest).nonzero()
        places = self._places * dp_size
        self._spread, self._waits = np.full((2, *size.shape), np.inf)
        self._spread[ends, begins] = 1 - cost[places[ends] - 1] / cost[places[begins]]
        self._waits[ends, begins] = size[ends, begins] / rows * _excess(cost, places[begins], places[ends], dp_size)

    def best(self, width: float) -> NDArray[np.int64]:
        """The cuts with which ranks wait least, where no band is wider than it must, and none divided for little.

        Args:
            width: By how much the least cost of a band may be below its greatest, as a share of that; more only where a
                band would have too few. One more band must save ``(width / 4) ** 2`` of the time, so that above 1 there
                are fewer and fewer.
        """
        count = len(self._places)
        waits = np.where(self._smallest | (self._spread <= width), self._waits, np.inf)
        least, before = np.zeros(count), np.zeros(count, np.int64)
        for end in range(1, count):
            costs = least[:end] + waits[end, :end]
            before[end] = costs.argmin()
            least[end] = costs[before[end]] + (width / 4) ** 2
        chosen = [count - 1]
        while chosen[-1]:
            chosen.append(int(before[chosen[-1]]))
        return self._places[chosen[::-1]]

    def waits(self, cuts: NDArray[np.int64]) -> float:
        """For how long ranks wait with such cuts, predicted, over the time that they work."""
        numbers = np.searchsorted(self._places, cuts)
        return float(self._waits[numbers[1:], numbers[:-1]].sum())

    def between(self, wide: NDArray[np.int64], narrow: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """From the wide cuts to the narrow ones, by more and more of the narrow ones at the costliest."""
        steps = [wide]
        for number, row in enumerate(narrow[1:-1], start=2):
            behind = wide[wide >= row + self._least_rows]
            if len(behind):
                steps.append(np.concatenate([narrow[:number], behind]))
        return [*steps, narrow]


def _places(first: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows where a band may begin, and their number; of the falling costs (rows,) that rows begin with."""
    in_order = np.linspace(0, len(first), _PLACES + 1).astype(np.int64)
    in_cost = np.searchsorted(-first, -np.linspace(first[0], first[-1], _PLACES + 1))
    return np.unique(np.concatenate([in_order, in_cost]))


def _excess(
    cost: NDArray[np.float64], begin: NDArray[np.int64], end: NDArray[np.int64], dp_size: int
) -> NDArray[np.float64]:
    """(bands,) by how much the costliest of a row is above the mean of its band, over the mean of all."""
    # The first of R random places in [0, 1] is below 1 - (1 - u)^(1 / R) with a chance of u. Most nodes are at the top.
    nodes = [(number + 0.5) / _NODES for number in range(_NODES)]
    first = [1 - (1 - node**2) ** (1 / dp_size) for node in nodes]
    costs = [cost[begin + ((end - begin) * place).astype(np.int64)] for place in first]
    costliest = sum(2 * node / _NODES * each for node, each in zip(nodes, costs, strict=True))
    sums = np.concatenate([[0.0], np.cumsum(cost)])
    mean = (sums[end] - sums[begin]) / (end - begin)
    excess: NDArray[np.float64] = np.maximum(costliest - mean, 0) / (sums[-1] / len(cost))
    return excess
