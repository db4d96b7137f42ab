"""Measured points of cost, and what all fits to them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_FOLDS = 5


class Points(NamedTuple):
    """Measured costs, all of shape (points,) and float64.

    Attributes:
        samples: Batch sizes B.
        lengths: Sequence lengths S.
        seconds: Compute time of each.
        weights: How much each counts, above zero.
    """

    samples: Vector
    lengths: Vector
    seconds: Vector
    weights: Vector

    def where(self, chosen: NDArray[np.bool_]) -> Points:
        """The chosen points, by a mask of shape (points,)."""
        return Points(*(column[chosen] for column in self))

    def beside(self, others: Points) -> Points:
        """These points, then the others."""
        return Points(*map(np.concatenate, zip(self, others, strict=True)))

    def alone(self, form: CostForm) -> Points:
        """One sample of each length, with what a formula says that it takes."""
        ones = np.ones_like(self.samples)
        return self._replace(samples=ones, seconds=form.predict(ones, self.lengths))

    def errors_of(self, form: CostForm) -> Vector:
        """Absolute relative error of a formula at every point, (points,)."""
        return np.abs(form.predict(self.samples, self.lengths) / self.seconds - 1)


class CostForm(Protocol):
    """A fitted formula."""

    def predict(self, samples: Vector, lengths: Vector) -> Vector:
        """Seconds of B samples of S tokens."""


def held_out_errors(fit: Callable[[Points], CostForm], points: Points) -> Vector:
    """Absolute relative error of every point, predicted from the other sequence lengths; (points,)."""
    errors = np.empty_like(points.seconds)
    lengths = np.unique(points.lengths)
    for fold in range(min(_FOLDS, len(lengths))):
        out = np.isin(points.lengths, lengths[fold::_FOLDS])
        errors[out] = points.where(out).errors_of(fit(points.where(~out)))
    return errors


def weighted_median(values: Vector, weights: NDArray[np.float64] | NDArray[np.int64]) -> float:
    """The least value that half of the weight lies at or below; both of shape (values,)."""
    return float(np.quantile(values, 0.5, weights=weights, method="inverted_cdf"))


def nonnegative_least_squares(terms: NDArray[np.float64], target: Vector) -> Vector:
    """Minimises ``|terms @ x - target|`` over x >= 0: a cost never shrinks with more work.

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
