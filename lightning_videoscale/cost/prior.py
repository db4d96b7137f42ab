"""What observations leave open of costs, taken from what held before.

Budgets make batch sizes and lengths vary together: where every micro-batch holds about as many tokens, B * S is
constant, and what is paid per step looks like what is paid per token. A fit then takes either, and is off by as much as
the batch size for one sample alone. So it is asked first how well the observations tell the cost of batch sizes that
they lack. Where they do not, the fit is given the ratio between batch sizes that the costs before it have.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.launch_bound import suffice
from lightning_videoscale.cost.points import Points, Vector
from lightning_videoscale.cost.step_time import AdditiveCost

OPEN = 1.0
"""Relative standard error of a cost from which the observations leave it open."""

_MISFIT = 0.02  # relative, of the form for any shape: more observations do not make it more certain
_WEIGHT = 0.05  # of a point of the prior, beside the mean observed shape: enough where nothing else speaks


def open_points(points: Points, noise: float, prior: Callable[[Vector, Vector], Vector]) -> Points:
    """Returns costs that the observations do not tell: one sample of a length, or as many tokens as any had.

    Args:
        points: What was observed.
        noise: Standard deviation of the logarithm of one time.
        prior: Seconds of B samples of S tokens as they were held to be, right up to a factor for each length.

    Returns:
        Points whose seconds are those observed of their length times the prior's ratio between the batch sizes; none
        where the observations tell, or are too few for any fit.
    """
    if not suffice(points.lengths):
        return points.where(np.zeros(len(points.lengths), bool))
    lengths, first = np.unique(points.lengths, return_index=True)
    at = np.array([i + np.argmax(points.weights[points.lengths == s]) for i, s in zip(first, lengths, strict=True)])
    most = np.maximum(1, (points.samples * points.lengths).max() // lengths)
    samples = np.concatenate([np.ones_like(lengths), most])
    lengths, at = np.tile(lengths, 2), np.tile(at, 2)
    seconds = points.seconds[at] * prior(samples, lengths) / prior(points.samples[at], lengths)
    asked = Points(samples, lengths, seconds, np.full(len(at), _WEIGHT * points.weights.mean()))
    return asked.where(_errors(asked, points, noise) > OPEN)


def _errors(asked: Points, points: Points, noise: float) -> Vector:
    """Relative standard errors of the sum's predictions, (asked,)."""
    seen, wanted = _terms(points), _terms(asked)
    # No term takes more than the whole time of what was observed: that is known without any fit.
    scale = seen.max(axis=0)
    seen, wanted = seen / scale, wanted / scale
    certain = 1 / (noise**2 / points.weights + _MISFIT**2)
    information = np.eye(seen.shape[1]) + seen.T @ (seen * certain[:, None])
    variances = np.einsum("ni,ij,nj->n", wanted, np.linalg.inv(information), wanted)
    return np.asarray(np.sqrt(variances), np.float64)


def _terms(points: Points) -> NDArray[np.float64]:
    """What each coefficient of the sum is multiplied by, over the seconds, (points, terms)."""
    return AdditiveCost.terms(points.samples, points.lengths) / points.seconds[:, None]
