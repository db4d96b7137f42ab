"""How many different shapes meet in a step: a gradient from one shape alone is a poor one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

ENOUGH = 0.8
"""What steps should have where equal costs allow it."""


def diversity(shape_id: NDArray[np.int64]) -> float:
    """Different shapes in a step over how many as many random micro-batches would have, the mean over steps.

    Args:
        shape_id: (steps, slots) shapes of the micro-batches.
    """
    in_step = np.sort(shape_id, axis=1)
    distinct = 1 + (np.diff(in_step, axis=1) != 0).sum(axis=1)
    counts = np.bincount(in_step.ravel())
    # Of the slots of a step, drawn without replacement, the chance that none has a shape.
    none = hypergeom.pmf(0, in_step.size, counts, in_step.shape[1])
    return float(distinct.mean() / (1 - none).sum())
