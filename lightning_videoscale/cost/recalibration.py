"""Corrects costs and budgets by what a run observes, and does not mistake a slow GPU for a wrong cost.

Every so many steps all ranks' compute times come together (`Observation`). The seconds of rank r for B samples of S
tokens are taken as ``speed_r * cost(B, S) * noise``: speeds are medians of the residuals, costs a fit to the times
divided by the speeds, and the two alternate. The lower median of the speeds is 1 by definition, so that costs are those
of a healthy GPU and one slow rank moves no budget.

What was observed is kept per (B, S) and fades from window to window: an exponential moving average of observations
rather than of coefficients, which are ill-determined in windows of few shapes. From it,

- the power law a + b * B * S^p, whose p moves by `P_STEP` at most at a time, and the additive form;
- M_comp = (target_sync - a) / b, AdaptiveLoad's; without a target in seconds, what one sample of the length S* costs
  that the first budget allows alone: S*^p. It moves by `BATCH_STEP` at most at a time;
- M_mem, from peaks of memory, by `MEMORY_STEP` at most at a time.

Changes below `TOLERANCE` are noise and are left alone (hysteresis).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.least_squares import Vector
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.cost.step_time import StepTimeModel
from lightning_videoscale.cost.weighted_fit import P_BOUNDS, Points, fit_power_law, fit_step_time

P_STEP = 0.08
"""Most that p moves at a time."""
BATCH_STEP = 1.5
"""Most that the compute budget grows or shrinks at a time, as a factor of B at one sequence length."""
MEMORY_STEP = 1.25
"""Most that M_mem grows or shrinks at a time: larger batches are tried before they are extrapolated from."""
TOLERANCE = 0.03
"""Relative change of M_comp, or of predicted costs beside each other, that is worth a new plan."""
MEMORY_TOLERANCE = 0.1
"""The same of M_mem."""
KEPT = 0.9
"""Weight of what was observed, one window later."""
SLOW = 1.1
"""Speed from which a rank is called slow."""

_FORGOTTEN = 0.05  # weight below which a shape is dropped
_ROUNDS = 4  # of alternation between speeds and costs; both settle to 1e-3 in two or three
_OUTLIER = 4.685  # standard deviations beyond which Tukey's biweight gives no weight: 95 % efficient for normal noise
_SHAPES_FOR_A_LINE = 3
_RESERVE = 0.08  # of the memory; the allocator's gaps need some


class Observation(NamedTuple):
    """One micro-batch on one data-parallel rank.

    Attributes:
        dp_rank: Who computed it.
        samples: Batch size B.
        sequence_length: Tokens S of one sample.
        seconds: Compute time without waits.
    """

    dp_rank: float
    samples: float
    sequence_length: float
    seconds: float


class Outcome(NamedTuple):
    """What a window led to.

    Attributes:
        calibration: What holds from now on.
        changed: Whether it is another one than before.
        reason: Why, in a sentence.
    """

    calibration: Calibration
    changed: bool
    reason: str


class Recalibration:
    """The loop from observed times to budgets; a pure function of its state and of what it is given.

    Args:
        calibration: What the run starts with.
        target_sync: Seconds that a micro-batch may take. None keeps what the first budget means: the longest sample
            that it allows alone sets the time.

    Attributes:
        calibration: What holds now.
        speeds: Seconds of each data-parallel rank over those of a healthy one, of the last window.
        fitted: The last fit, whether it was adopted or not.
    """

    def __init__(self, calibration: Calibration, target_sync: float | None = None) -> None:
        self.calibration = calibration
        self.speeds: dict[int, float] = {}
        self.fitted: StepTimeModel | None = None
        self._target_sync = target_sync
        budget = calibration.budget
        self._alone = budget.m_comp ** (1 / budget.p)
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}  # (B, S): weight, mean logarithm of the seconds
        self._peaks: dict[int, float] = {}
        self._m_mem_limit = math.inf

    def limit_memory(self, m_mem: float) -> None:
        """Keeps M_mem at or below a number of tokens from now on, as after an out-of-memory."""
        self._m_mem_limit = min(self._m_mem_limit, m_mem)
        budget = self.calibration.budget
        if budget.m_mem > self._m_mem_limit:
            lower = BucketBudget(self._m_mem_limit, budget.m_comp, budget.p)
            self.calibration = Calibration(lower, self.calibration.step_time)

    def update(
        self,
        observations: Sequence[Observation],
        peaks: Mapping[int, float] | None = None,
        capacity: float | None = None,
    ) -> Outcome:
        """Takes in a window, and says what is to hold from now on.

        Args:
            observations: Of all ranks; those whose seconds are not finite and positive are left out.
            peaks: Highest memory in bytes by tokens B * S of the micro-batch that took it.
            capacity: Memory of the smallest device, in bytes.
        """
        now = self.calibration
        budget, step_time, reasons = now.budget, now.step_time, list[str]()
        try:
            self.fitted = self._fit(observations)
            m_comp, p = self._compute_budget(self.fitted)
            reason = self._difference(self.fitted, m_comp, p)
            if reason:
                step_time, budget = self.fitted, BucketBudget(budget.m_mem, m_comp, p)
                reasons.append(reason)
        except ValueError as error:
            reasons.append(f"costs stay: {error}")
        m_mem, reason = self._memory_budget(peaks or {}, capacity)
        if m_mem != budget.m_mem:
            budget = BucketBudget(m_mem, budget.m_comp, budget.p)
            reasons.append(reason)
        self.calibration = Calibration(budget, step_time)
        slow = [f"rank {rank} ({speed:.2f} x)" for rank, speed in self.speeds.items() if speed > SLOW]
        if slow:
            reasons.append(f"slow, and no reason to change costs: {', '.join(slow)}")
        changed = self.calibration != now
        return Outcome(self.calibration, changed, "; ".join(reasons) or "within the tolerance of what holds")

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next update depends on, as plain numbers."""
        return {
            "calibration": self.calibration.to_dict(),
            "speeds": [*self.speeds.items()],
            "fitted": self.fitted.to_dict() if self.fitted else None,
            "alone": self._alone,
            "seen": [[*shape, *value] for shape, value in self._seen.items()],
            "peaks": [*self._peaks.items()],
            "m_mem_limit": self._m_mem_limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.calibration = Calibration.from_dict(state["calibration"])
        self.speeds = dict(state["speeds"])
        self.fitted = StepTimeModel.from_dict(state["fitted"]) if state["fitted"] else None
        self._alone = state["alone"]
        self._seen = {(b, s): (weight, mean) for b, s, weight, mean in state["seen"]}
        self._peaks = dict(state["peaks"])
        self._m_mem_limit = state["m_mem_limit"]

    # -- costs and speeds ----------------------------------------------------------------------------------------

    def _fit(self, observations: Sequence[Observation]) -> StepTimeModel:
        """Alternates speeds and costs over the window, and adds it to what was seen."""
        rows = np.array(observations, np.float64).reshape(-1, len(Observation._fields))
        rows = rows[np.isfinite(rows).all(axis=1) & (rows[:, 1:] > 0).all(axis=1)]
        rank, samples, lengths, seconds = rows.T
        if not len(rows):
            raise ValueError("no times were observed")
        ranks, of_rank = np.unique(rank, return_inverse=True)
        speeds = np.array([self.speeds.get(int(r), 1.0) for r in ranks])
        weights = np.ones(len(rows))
        for _ in range(_ROUNDS):
            seen = _merge(self._seen, samples, lengths, np.log(seconds / speeds[of_rank]), weights)
            law = fit_power_law(_points(seen))
            residuals = np.log(seconds) - np.log(law.predict(samples, lengths))
            medians = np.array([np.median(residuals[of_rank == n]) for n in range(len(ranks))])
            # With an even number of ranks the faster middle one counts: of two, the slow one is the odd one out.
            speeds = np.exp(medians - np.sort(medians)[(len(medians) - 1) // 2])
            weights = _biweight(residuals - medians[of_rank])
        self._seen = _merge(self._seen, samples, lengths, np.log(seconds / speeds[of_rank]), weights)
        self.speeds = {int(r): float(speed) for r, speed in zip(ranks, speeds, strict=True)}
        points = _points(self._seen)
        free = fit_step_time(points)
        p = self.calibration.budget.p
        low, high = (min(max(bound, P_BOUNDS[0]), P_BOUNDS[1]) for bound in (p - P_STEP, p + P_STEP))
        return free if low <= free.power_law.p <= high else fit_step_time(points, (min(low, high), max(low, high)))

    def _compute_budget(self, fitted: StepTimeModel) -> tuple[float, float]:
        """M_comp and p, clamped to `BATCH_STEP` at the length that sets the time."""
        before, p = self.calibration.budget, fitted.power_law.p
        if math.isinf(before.m_comp):
            return math.inf, p
        if self._target_sync is None:
            return self._alone**p, p
        wanted = fitted.budget(self._target_sync, before.m_mem).m_comp
        # How many samples of this length the budget has room for is what M_comp of different p have in common.
        room = before.m_comp / self._alone**before.p
        return self._alone**p * min(max(wanted / self._alone**p, room / BATCH_STEP), room * BATCH_STEP), p

    def _difference(self, fitted: StepTimeModel, m_comp: float, p: float) -> str:
        """Why the fit is worth a new plan, or nothing."""
        now = self.calibration
        if now.step_time is None:
            return f"first fit of {len(self._seen)} observed shapes: {_describe(m_comp, p)}"
        moved = abs(math.log(m_comp / now.budget.m_comp)) if math.isfinite(m_comp) else abs(p - now.budget.p)
        if moved > TOLERANCE:
            return f"compute budget from {_describe(now.budget.m_comp, now.budget.p)} to {_describe(m_comp, p)}"
        points = _points(self._seen)
        ratio = np.log(
            fitted.predict(points.samples, points.lengths) / now.step_time.predict(points.samples, points.lengths)
        )
        mean = float(np.average(ratio, weights=points.weights))
        uneven = math.sqrt(float(np.average((ratio - mean) ** 2, weights=points.weights)))
        return f"costs of shapes beside each other moved by {uneven:.1%}" if uneven > TOLERANCE else ""

    # -- memory --------------------------------------------------------------------------------------------------

    def _memory_budget(self, peaks: Mapping[int, float], capacity: float | None) -> tuple[float, str]:
        """M_mem and the reason for it."""
        before = self.calibration.budget.m_mem
        for tokens, peak in peaks.items():
            self._peaks[tokens] = max(peak, self._peaks.get(tokens, 0.0))
        if capacity is None or len(self._peaks) < _SHAPES_FOR_A_LINE:
            return before, ""
        try:
            model = MemoryModel.fit([Measurement(1, tokens, 0.0, peak) for tokens, peak in self._peaks.items()])
            wanted = float(model.m_mem(capacity, _RESERVE))
        except ValueError:  # the peaks do not grow with the tokens yet
            return before, ""
        wanted = min(max(wanted, before / MEMORY_STEP), before * MEMORY_STEP, self._m_mem_limit)
        if abs(math.log(wanted / before)) <= MEMORY_TOLERANCE:
            return before, ""
        return float(
            int(wanted)
        ), f"M_mem from {before:.0f} to {wanted:.0f} tokens, by peaks of {len(self._peaks)} sizes"


def _merge(
    seen: Mapping[tuple[int, int], tuple[float, float]],
    samples: Vector,
    lengths: Vector,
    logarithms: Vector,
    weights: Vector,
) -> dict[tuple[int, int], tuple[float, float]]:
    """What was seen, faded by one window, and a window's observations by (B, S)."""
    merged = {shape: (weight * KEPT, mean) for shape, (weight, mean) in seen.items() if weight * KEPT > _FORGOTTEN}
    for shape, weight, mean in _by_shape(samples, lengths, logarithms, weights):
        before, old = merged.get(shape, (0.0, 0.0))
        merged[shape] = before + weight, (before * old + weight * mean) / (before + weight)
    return merged


def _by_shape(
    samples: Vector, lengths: Vector, values: Vector, weights: Vector
) -> Iterable[tuple[tuple[int, int], float, float]]:
    """Weight and weighted mean of the values of every (B, S) that has any weight."""
    shapes, which = np.unique(np.stack([samples, lengths], axis=1), axis=0, return_inverse=True)
    total = np.bincount(which.ravel(), weights, len(shapes))
    sums = np.bincount(which.ravel(), weights * values, len(shapes))
    for (b, s), weight, value in zip(shapes.tolist(), total.tolist(), sums.tolist(), strict=True):
        if weight > 0:
            yield (int(b), int(s)), weight, value / weight


def _points(seen: Mapping[tuple[int, int], tuple[float, float]]) -> Points:
    rows: NDArray[np.float64] = np.array([(*shape, *value) for shape, value in sorted(seen.items())], np.float64)
    samples, lengths, weights, means = rows.T
    return Points(samples, lengths, np.exp(means), weights)


def _biweight(residuals: Vector) -> Vector:
    """Tukey's weights in [0, 1], by the median absolute deviation."""
    scale = max(1.4826 * float(np.median(np.abs(residuals))), 1e-6)
    weights: Vector = np.maximum(0.0, 1 - (residuals / (_OUTLIER * scale)) ** 2) ** 2
    return weights


def _describe(m_comp: float, p: float) -> str:
    return f"M_comp = {m_comp:.4g}, p = {p:.3f}"
