"""Least squares with coefficients that must not be negative: a cost never shrinks with more work."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def nonnegative_least_squares(terms: NDArray[np.float64], target: Vector) -> Vector:
    """Minimises ``|terms @ x - target|`` over x >= 0.

    Args:
        terms: Shape (measurements, terms).
        target: Shape (measurements,).

    Returns:
        x, shape (terms,).
    """
    from scipy.optimize import nnls  # half a second to import, and only fits need it

    # A column of squared lengths is ten orders of magnitude above one of ones, and the solver's tolerance may follow
    # the largest.
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1.0
    solution: Vector = nnls(terms / scale, target)[0] / scale
    return solution
