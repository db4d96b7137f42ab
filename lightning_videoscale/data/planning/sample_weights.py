"""What a sample counts for in the gradients of an epoch, by its shape."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.epoch_plan import EpochPlan


def weights_and_samples(plan: EpochPlan) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns of each shape of the plan's table the sum of its samples' weights, and how many count; both (shapes,)."""
    shapes, samples = len(plan.table.shapes), np.where(plan.filler, 0, np.diff(plan.starts))
    of_slot = plan.shape_id[plan.grid].ravel()
    weights, counts = (np.bincount(of_slot, x.ravel(), shapes) for x in (plan.weight, samples[plan.grid]))
    return weights.astype(np.float64), counts.astype(np.float64)


def relative_weights(weights: NDArray[np.float64], samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns what a sample of each shape counts for over the mean of all samples; NaN where a shape has none."""
    mean = weights.sum() / samples.sum()
    relative: NDArray[np.float64] = np.full(len(samples), np.nan)
    np.divide(weights, samples * mean, out=relative, where=samples > 0)
    return relative
