"""How unequal the ranks of a step are, by times, costs or loads."""

from __future__ import annotations

from torch import Tensor


def cv_step(times: Tensor) -> Tensor:
    """CV_step = (max - min) / max over the ranks (AdaptiveLoad, section on metrics).

    Args:
        times: (ranks, ...), at or above zero.

    Returns:
        (...), in [0, 1]; 0 where no rank took any time.
    """
    slowest = times.amax(dim=0)
    return (slowest - times.amin(dim=0)) / slowest.where(slowest != 0, 1.0)


def compute_cv(loads: Tensor) -> Tensor:
    """Compute CV = std / mean over the ranks: of a whole population, as every rank is seen.

    Args:
        loads: (ranks, ...), with a mean above zero.

    Returns:
        (...), at or above 0.
    """
    return loads.std(dim=0, correction=0) / loads.mean(dim=0)
