"""A step-time model of many noisy observations of different weight.

`StepTimeModel.fit` follows the paper: a clean benchmark, absolute errors, p to two digits. Observations of a training
run come by the thousand and unevenly: here errors are relative, every point has a weight, and p is continuous, since
M_comp = S^p moves by a tenth for 0.01 of p at 30 000 tokens.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.launch_bound import above_floor, suffice
from lightning_videoscale.cost.points import Points, Vector, weighted_median
from lightning_videoscale.cost.step_time import AdditiveCost, PowerLaw, StepTimeModel, fit_forms

P_BOUNDS = 1.0, 2.4
"""Where p is searched: from linear layers alone to where the paper's search ends. The paper's begins at 1.6; on
relative errors, and with short samples among them, the best p is often below."""

_MUCH_SMALLER = 0.5


def fit_step_time(points: Points, p_bounds: tuple[float, float] = P_BOUNDS) -> StepTimeModel:
    """Fits both forms of the step-time model to weighted points, on relative error.

    Steps near the floor are left out, as in `StepTimeModel.fit`, but only where that makes held-out errors much
    smaller: where the host is no limit, they say as much as others.

    Args:
        points: At least 6 points of at least 3 sequence lengths.
        p_bounds: Least and greatest p; equal to hold it.

    Raises:
        ValueError: If there are too few points, or times do not grow with the work.
    """
    if not suffice(points.lengths):
        raise ValueError(
            f"{len(points.seconds)} shapes of {len(np.unique(points.lengths))} sequence lengths seen so far; a "
            "step-time model needs 6 of 3."
        )
    model = _without_launches(points, p_bounds)
    if not model.grows_from(points.lengths.min()):
        raise ValueError(f"the times do not grow with the work ({model.form})")
    return model


def _without_launches(points: Points, p_bounds: tuple[float, float]) -> StepTimeModel:
    every, above = _fit(points, p_bounds), above_floor(points.lengths, points.seconds)
    if above.all():
        return every
    higher = _fit(points.where(above), p_bounds)
    if _error(higher) > _MUCH_SMALLER * _error(every):
        return every
    return higher.with_floor(points)


def _fit(points: Points, p_bounds: tuple[float, float]) -> StepTimeModel:
    power_law, additive, *errors = fit_forms(points, partial(fit_power_law, p_bounds=p_bounds), _fit_additive)
    if power_law.b <= 0:
        raise ValueError(f"the times do not grow with the work ({power_law})")
    return StepTimeModel(power_law, additive, *(weighted_median(each, points.weights) for each in errors))


def _error(model: StepTimeModel) -> float:
    return min(model.power_law_error, model.additive_error)


def fit_power_law(points: Points, p_bounds: tuple[float, float] = P_BOUNDS) -> PowerLaw:
    """Fits a + b * B * S**p with a, b >= 0: p by a coarse and a fine grid."""
    low, high = p_bounds
    p = _vertex(points, np.linspace(low, high, 41)) if high > low else low
    p = _vertex(points, np.linspace(max(p - 0.02, low), min(p + 0.02, high), 5)) if high > low else low
    _, a, b = _fits_at(points, np.array([p]))
    law = PowerLaw(float(a[0]), float(b[0]), p, 0.0)
    w, t = points.weights, points.seconds
    residual = float(np.sum(w * (law.predict(points.samples, points.lengths) - t) ** 2))
    total = float(np.sum(w * (t - np.average(t, weights=w)) ** 2))
    return PowerLaw(law.a, law.b, law.p, 1.0 - residual / total if total > 0 else 0.0)


def fit_closer_form(points: Points) -> PowerLaw | AdditiveCost:
    """Fits both forms and returns the one with the smaller relative errors on these points; any number of them."""
    forms: list[PowerLaw | AdditiveCost] = [fit_power_law(points), _fit_additive(points)]
    return min(forms, key=lambda form: _loss(form, points))


def _loss(form: PowerLaw | AdditiveCost, points: Points) -> float:
    return float(points.weights @ (form.predict(points.samples, points.lengths) / points.seconds - 1) ** 2)


class Uncertainty(NamedTuple):
    """Covariance of a fitted power law's a, log b and p, shape (3, 3), by the linear approximation at the fit."""

    covariance: NDArray[np.float64]

    @classmethod
    def of(cls, points: Points, law: PowerLaw, noise: float) -> Uncertainty:
        """Follows from the noise of a point of weight 1, the standard deviation of its logarithm.

        What the law misses counts as noise too: with every new mix of shapes, another law is the nearest.
        """
        slopes = _slopes(points, law)
        information = slopes.T @ (slopes * points.weights[:, None])
        missed = np.log(law.predict(points.samples, points.lengths) / points.seconds)
        variance = noise**2 + float(np.average(missed**2, weights=points.weights))
        return cls(np.asarray(variance * np.linalg.pinv(information, hermitian=True), np.float64))

    def room(self, law: PowerLaw, target_sync: float, length: float) -> float:
        """Standard error of log((target_sync - a) / (b * length^p)); infinite where no step is as short."""
        if target_sync <= law.a:
            return math.inf
        return self._of(np.array([-1 / (target_sync - law.a), -1.0, -np.log(length)]))

    def power(self, length: float) -> float:
        """Standard error of log(length^p)."""
        return self._of(np.array([0.0, 0.0, np.log(length)]))

    def costs(self, points: Points, law: PowerLaw) -> float:
        """Standard error of the logarithm of predicted costs, root mean square over the points."""
        slopes = _slopes(points, law)
        variances = np.einsum("ni,ij,nj->n", slopes, self.covariance, slopes)
        return float(np.sqrt(np.average(variances, weights=points.weights)))

    def _of(self, direction: Vector) -> float:
        return float(np.sqrt(direction @ self.covariance @ direction))


def _slopes(points: Points, law: PowerLaw) -> NDArray[np.float64]:
    """Derivatives of the logarithm of predicted seconds by a, log b and p; (points, 3)."""
    predicted = law.predict(points.samples, points.lengths)
    share = (predicted - law.a) / predicted
    return np.stack([1 / predicted, share, share * np.log(points.lengths)], axis=1)


def _vertex(points: Points, exponents: Vector) -> float:
    """The best p of an even grid, moved to where the parabola through it and its neighbours is lowest."""
    loss, _, _ = _fits_at(points, exponents)
    best = int(np.argmin(loss))
    if 0 < best < len(exponents) - 1:
        left, middle, right = loss[best - 1 : best + 2]
        bend = float(left - 2 * middle + right)
        if bend > 0:
            return float(exponents[best] + 0.5 * (exponents[1] - exponents[0]) * (left - right) / bend)
    return float(exponents[best])


def _fits_at(points: Points, exponents: Vector) -> tuple[Vector, Vector, Vector]:
    """Loss, a and b at every p, each of shape (exponents,): weighted least squares of prediction / seconds - 1."""
    unit = float(np.exp(np.average(np.log(points.lengths), weights=points.weights)))
    w = points.weights / points.weights.sum()
    x = 1.0 / points.seconds
    y = points.samples * (points.lengths / unit) ** exponents[:, None] * x
    xx, x1 = np.sum(w * x * x), np.sum(w * x)
    yy, y1, xy = y**2 @ w, y @ w, y @ (w * x)
    determinant = xx * yy - xy**2
    safe = np.where(determinant > 0, determinant, 1.0)
    a = np.where(determinant > 0, (x1 * yy - y1 * xy) / safe, 0.0)
    b = np.where(determinant > 0, (y1 * xx - x1 * xy) / safe, 0.0)
    # The best with a, b >= 0: without the one that would be negative.
    is_alone, is_flat = (a < 0) | (determinant <= 0), (b < 0) & (determinant > 0)
    a, b = np.where(is_alone, 0.0, a), np.where(is_alone, y1 / yy, b)
    a, b = np.where(is_flat, x1 / xx, a), np.where(is_flat, 0.0, b)
    loss = ((a[:, None] * x + b[:, None] * y - 1) ** 2) @ w
    return loss, a, b / unit**exponents


def _fit_additive(points: Points) -> AdditiveCost:
    return AdditiveCost.fit(*points)
