"""Least squares with coefficients that must not be negative: a cost never shrinks with more work."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def nonnegative_least_squares(terms: NDArray[np.float64], target: Vector) -> Vector:
    """Minimises ``|terms @ x - target|`` over x >= 0.

    Of a few terms, every subset is tried: the best solution is the plain one of the terms that it uses.

    Args:
        terms: Shape (measurements, terms), a handful of terms.
        target: Shape (measurements,).

    Returns:
        x, shape (terms,).
    """
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(terms.shape[1]), float(np.sum(target**2))
    for count in range(1, terms.shape[1] + 1):
        for used in map(list, combinations(range(terms.shape[1]), count)):
            found, *_ = np.linalg.lstsq(terms[:, used] / scale[used], target, rcond=None)
            residual = float(np.sum((terms[:, used] @ (found / scale[used]) - target) ** 2))
            if (found >= 0).all() and residual < least:
                best, least = np.zeros(terms.shape[1]), residual
                best[used] = found / scale[used]
    return best
