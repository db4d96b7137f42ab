"""What the ranks of a run observe, with the ranks' own speeds taken out.

The seconds of rank r for B samples of S tokens are taken as ``speed_r * cost(B, S) * noise``: speeds are medians of the
residuals, costs a fit to the times divided by the speeds, and the two alternate. The lower median of the speeds is 1 by
definition, so that costs are those of a healthy GPU: one slow rank moves none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.points import Points, Vector
from lightning_videoscale.cost.weighted_fit import fit_closer_form

KEPT = 0.9
"""Weight of what was observed, one window later; small windows fade more slowly."""

_LEAST_MEMORY = 500  # observations that are remembered at least, so that windows of few are not noisier
_FORGOTTEN = 0.05  # weight below which a shape is dropped
_ROUNDS = 4  # of alternation between speeds and costs; both settle to 1e-3 in two or three
_OUTLIER = 4.685  # standard deviations beyond which Tukey's biweight gives no weight: 95 % efficient for normal noise


class ObservedCosts:
    """What was observed, per (B, S), fading from window to window.

    That is an exponential moving average of observations rather than of coefficients, which are ill-determined in
    windows of few shapes.

    Attributes:
        speeds: Seconds of each data-parallel rank over those of a healthy one, in the last window.
        noise: Standard deviation of the logarithm of a single time, in the last window.
    """

    def __init__(self) -> None:
        self.speeds: dict[int, float] = {}
        self.noise = 0.0
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}  # (B, S): weight, mean logarithm of the seconds

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, observations: Sequence[Measurement]) -> None:
        """Takes in a window; times that are not finite and positive are left out, wild ones weigh little or nothing.

        Raises:
            ValueError: If none is left.
        """
        columns = [(m.dp_rank, m.samples, m.sequence_length, m.seconds) for m in observations]
        rows = np.array(columns, np.float64).reshape(-1, 4)
        rows = rows[np.isfinite(rows).all(axis=1) & (rows[:, 1:] > 0).all(axis=1)]
        if not len(rows):
            raise ValueError("no times were observed")
        rank, samples, lengths, seconds = rows.T
        ranks, of_rank = np.unique(rank, return_inverse=True)
        speeds = np.array([self.speeds.get(int(r), 1.0) for r in ranks])
        weights = np.ones(len(rows))
        for _ in range(_ROUNDS):
            seen = self._with(samples, lengths, np.log(seconds / speeds[of_rank]), weights)
            law = fit_closer_form(_points(seen))
            residuals = np.log(seconds) - np.log(law.predict(samples, lengths))
            medians = np.array([np.median(residuals[of_rank == n]) for n in range(len(ranks))])
            # With an even number of ranks the faster middle one counts: of two, the slow one is the odd one out.
            speeds = np.exp(medians - np.sort(medians)[(len(medians) - 1) // 2])
            weights, self.noise = _biweight(residuals - medians[of_rank])
        self._seen = self._with(samples, lengths, np.log(seconds / speeds[of_rank]), weights)
        self.speeds = {int(r): float(speed) for r, speed in zip(ranks, speeds, strict=True)}

    def points(self) -> Points:
        """What is remembered."""
        return _points(self._seen)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for checkpoints and JSON."""
        return {
            "speeds": [[*item] for item in self.speeds.items()],
            "noise": self.noise,
            "seen": [[*shape, *value] for shape, value in self._seen.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.speeds = dict(state["speeds"])
        self.noise = state["noise"]
        self._seen = {(b, s): (weight, mean) for b, s, weight, mean in state["seen"]}

    def _with(
        self, samples: Vector, lengths: Vector, logarithms: Vector, weights: Vector
    ) -> dict[tuple[int, int], tuple[float, float]]:
        """What is remembered when a window's observations come to it."""
        kept = max(KEPT, 1 - len(samples) / _LEAST_MEMORY)
        merged = {shape: (weight * kept, mean) for shape, (weight, mean) in self._seen.items()}
        merged = {shape: value for shape, value in merged.items() if value[0] > _FORGOTTEN}
        for shape, weight, mean in _by_shape(samples, lengths, logarithms, weights):
            before, old = merged.get(shape, (0.0, 0.0))
            merged[shape] = before + weight, (before * old + weight * mean) / (before + weight)
        return merged


def _by_shape(
    samples: Vector, lengths: Vector, values: Vector, weights: Vector
) -> Iterator[tuple[tuple[int, int], float, float]]:
    """Weight and weighted mean of the values of every (B, S) that has any weight."""
    shapes, which = np.unique(np.stack([samples, lengths], axis=1), axis=0, return_inverse=True)
    total = np.bincount(which.ravel(), weights, len(shapes))
    sums = np.bincount(which.ravel(), weights * values, len(shapes))
    for (b, s), weight, value in zip(shapes.tolist(), total.tolist(), sums.tolist(), strict=True):
        if weight > 0:
            yield (int(b), int(s)), weight, value / weight


def _points(seen: dict[tuple[int, int], tuple[float, float]]) -> Points:
    rows = np.array([(*shape, *value) for shape, value in sorted(seen.items())], np.float64).reshape(-1, 4)
    samples, lengths, weights, means = rows.T
    return Points(samples, lengths, np.exp(means), weights)


def _biweight(residuals: Vector) -> tuple[Vector, float]:
    """Tukey's weights in [0, 1], and the standard deviation that they are by: of the median absolute deviation."""
    scale = max(1.4826 * float(np.median(np.abs(residuals))), 1e-6)
    weights: Vector = np.maximum(0.0, 1 - (residuals / (_OUTLIER * scale)) ** 2) ** 2
    return weights, scale
