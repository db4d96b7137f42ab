"""How many different shapes meet in a step: a gradient from one shape alone is a poor one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def diversity(shape_id: NDArray[np.int64]) -> float:
    """Different shapes in a step over how many as many random micro-batches would have, the mean over steps.

    Args:
        shape_id: (steps, slots) shapes of the micro-batches.
    """
    in_step = np.sort(shape_id, axis=1)
    distinct = 1 + (np.diff(in_step, axis=1) != 0).sum(axis=1)
    total, drawn = in_step.size, in_step.shape[1]
    expected = sum(1 - _none_of(total, int(count), drawn) for count in np.bincount(in_step.ravel()) if count)
    return float(distinct.mean() / expected)


def _none_of(total: int, marked: int, drawn: int) -> float:
    """Probability that ``drawn`` of ``total`` things hold none of the ``marked``: hypergeometric."""
    if marked > total - drawn:
        return 0.0
    ways = [(total - marked, 1), (total - drawn, 1), (total - marked - drawn, -1), (total, -1)]
    return math.exp(sum(sign * math.lgamma(n + 1) for n, sign in ways))
