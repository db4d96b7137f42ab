"""Launch-bound steps: so small that the host takes longer to launch them than the device to do them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.points import Points, Vector, weighted_median

_NEAR_FLOOR = (2.0, 1.5)
"""Times the shortest, whichever leaves enough to fit a model to; launches themselves differ by less."""
_MEASUREMENTS, _LENGTHS = 6, 3
"""What a fit needs at least."""


def suffice(lengths: Vector) -> bool:
    """Whether there are enough measurements, of enough sequence lengths, to fit a step-time model to."""
    return len(lengths) >= _MEASUREMENTS and len(np.unique(lengths)) >= _LENGTHS


def above_floor(lengths: Vector, seconds: Vector) -> NDArray[np.bool_]:
    """What takes more than 2 times as long as the shortest, or else 1.5; all, where that is too little to fit."""
    above = (seconds > factor * seconds.min() for factor in _NEAR_FLOOR)
    return next((each for each in above if suffice(lengths[each])), np.ones_like(lengths, np.bool_))


def floor_of(predicted: Vector, points: Points) -> float:
    """What steps take whose work the device does in less than the shortest of all took: their weighted median.

    The shortest itself is the luckiest of them: the host's times vary more than the device's.

    Args:
        predicted: What the device's work takes by a model of what lies above the floor, in seconds.
        points: What was measured.
    """
    shortest = points.seconds.min()
    is_launch = predicted < shortest
    if not is_launch.any():
        return float(shortest)
    return weighted_median(points.seconds[is_launch], points.weights[is_launch])
