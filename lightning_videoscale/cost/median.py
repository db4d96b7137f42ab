"""The median of values that count unequally."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.least_squares import Vector


def weighted_median(values: Vector, weights: NDArray[np.float64] | NDArray[np.int64]) -> float:
    """The least value that half of the weight lies at or below; both of shape (values,)."""
    return float(np.quantile(values, 0.5, weights=weights, method="inverted_cdf"))
