"""How unequal the ranks of a step are, by times, costs or loads."""

from __future__ import annotations

from torch import Tensor


def cv_step(times: Tensor) -> Tensor:
    """CV_step = (max - min) / max over the ranks, (ranks, ...) to (...) (AdaptiveLoad, section on metrics)."""
    slowest = times.amax(dim=0)
    return (slowest - times.amin(dim=0)) / slowest


def compute_cv(loads: Tensor) -> Tensor:
    """Compute CV = std / mean over the ranks, (ranks, ...) to (...): of a whole population, as every rank is seen."""
    return loads.std(dim=0, correction=0) / loads.mean(dim=0)
