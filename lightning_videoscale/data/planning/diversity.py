"""How many different shapes a step has: a gradient from one shape alone is a poor one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

ENOUGH = 0.8
"""What steps should have where equal costs allow it."""


def diversity(shape_id: NDArray[np.int64]) -> float:
    """Different shapes in a step over how many random ones would have, mean over steps; of ids (steps, slots)."""
    return float(distinct(shape_id).mean() / distinct_at_random(np.bincount(shape_id.ravel()), shape_id.shape[1]))


def distinct(shape_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """Different shapes of each step, (steps,)."""
    found: NDArray[np.int64] = 1 + (np.diff(np.sort(shape_id, axis=1), axis=1) != 0).sum(axis=1)
    return found


def distinct_at_random(counts: NDArray[np.int64], slots: int) -> float:
    """How many shapes a step of ``slots`` micro-batches drawn from (shapes,) counts would have, without replacement."""
    none = hypergeom.pmf(0, counts.sum(), counts, slots)  # the chance that none of them has a shape
    return float((1 - none).sum())
