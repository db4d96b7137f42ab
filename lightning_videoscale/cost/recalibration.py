"""Corrects costs and budgets by what a run observes.

From all ranks' times for their micro-batches, remembered with the ranks' own speeds taken out (`ObservedCosts`), follow

- the power law a + b * B * S^p, whose p moves by `P_STEP` at most at a time, and the additive form;
- M_comp = (target_sync - a) / b, AdaptiveLoad's; without a target in seconds, room for as many of the longest samples
  as in the first budget, n * S^p. It moves by `BATCH_STEP` at most at a time;
- M_mem, from peaks of memory, by `MEMORY_STEP` at most at a time.

A change that is small (`TOLERANCE`), or that noise may have made (`CERTAIN`), is left alone: hysteresis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.cost.observations import ObservedCosts
from lightning_videoscale.cost.step_time import StepTimeModel
from lightning_videoscale.cost.weighted_fit import P_BOUNDS, Uncertainty, fit_step_time

P_STEP = 0.08
"""Most that p moves at a time."""
BATCH_STEP = 1.5
"""Most that the compute budget grows or shrinks at a time, as a factor of B at one sequence length."""
MEMORY_STEP = 1.25
"""Most that M_mem grows or shrinks at a time: larger batches are tried before they are extrapolated from."""
TOLERANCE = 0.03
"""Relative change of M_comp, or of predicted costs beside each other, that is worth a new plan."""
CERTAIN = 2.5
"""Standard errors that such a change must have."""
MEMORY_TOLERANCE = 0.1
"""Relative change of M_mem that is worth a new plan."""
SLOW = 1.1
"""Speed from which a rank is called slow."""

_SHAPES_FOR_A_LINE = 3
_RESERVE = 0.08  # of the memory; the allocator's gaps need some


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
        target_sync: Seconds that a micro-batch may take. None keeps what the first budget means: room for so many
            samples of the longest.
        longest: Tokens of the longest sample. None: as many as the first budget has room for one of.

    Attributes:
        calibration: What holds now.
        fitted: The last fit, whether it was adopted or not.
    """

    def __init__(
        self, calibration: Calibration, target_sync: float | None = None, longest: float | None = None
    ) -> None:
        self.calibration = calibration
        self.fitted: StepTimeModel | None = None
        self._observed = ObservedCosts()
        self._target_sync = target_sync
        budget = calibration.budget
        self._longest = longest if longest is not None else budget.m_comp ** (1 / budget.p)
        self._peaks: dict[int, float] = {}
        self._m_mem_limit = math.inf

    @property
    def speeds(self) -> dict[int, float]:
        """Seconds of each data-parallel rank over those of a healthy one, in the last window."""
        return self._observed.speeds

    def limit_memory(self, m_mem: float) -> None:
        """Keeps M_mem at or below a number of tokens from now on, as after an out-of-memory."""
        self._m_mem_limit = min(self._m_mem_limit, m_mem)
        budget = self.calibration.budget
        if budget.m_mem > self._m_mem_limit:
            lower = BucketBudget(self._m_mem_limit, budget.m_comp, budget.p)
            self.calibration = Calibration(lower, self.calibration.step_time)

    def update(
        self,
        observations: Sequence[Measurement],
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
            self._observed.add(observations)
            self.fitted = self._fit()
            m_comp, p = self._compute_budget(self.fitted)
            if reason := self._difference(self.fitted, m_comp, p):
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
            "fitted": self.fitted.to_dict() if self.fitted else None,
            "observed": self._observed.state_dict(),
            "peaks": [[*item] for item in self._peaks.items()],
            "m_mem_limit": self._m_mem_limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.calibration = Calibration.from_dict(state["calibration"])
        self.fitted = StepTimeModel.from_dict(state["fitted"]) if state["fitted"] else None
        self._observed.load_state_dict(state["observed"])
        self._peaks = dict(state["peaks"])
        self._m_mem_limit = state["m_mem_limit"]

    def _fit(self) -> StepTimeModel:
        """The fit to all that is remembered, with p near what holds."""
        points, p = self._observed.points(), self.calibration.budget.p
        free = fit_step_time(points)
        low, high = (min(max(bound, P_BOUNDS[0]), P_BOUNDS[1]) for bound in (p - P_STEP, p + P_STEP))
        return free if low <= free.power_law.p <= high else fit_step_time(points, (low, high))

    def _compute_budget(self, fitted: StepTimeModel) -> tuple[float, float]:
        """M_comp and p, clamped to `BATCH_STEP` at the longest sample."""
        before, p = self.calibration.budget, fitted.power_law.p
        if math.isinf(before.m_comp):
            return math.inf, p
        # How many samples of one length there is room for is what M_comp of different p have in common.
        one = self._longest**p
        room = before.m_comp / self._longest**before.p
        if self._target_sync is None:
            return room * one, p
        wanted = fitted.budget(self._target_sync, before.m_mem).m_comp / one
        return one * min(max(wanted, room / BATCH_STEP), room * BATCH_STEP), p

    def _difference(self, fitted: StepTimeModel, m_comp: float, p: float) -> str:
        """Why the fit is worth a new plan, or nothing."""
        now, points, law = self.calibration, self._observed.points(), fitted.power_law
        move = f"from {_describe(now.budget.m_comp, now.budget.p)} to {_describe(m_comp, p)}"
        if now.step_time is None:
            return f"first fit, of {len(self._observed)} observed shapes: compute budget {move}"
        new = fitted.predict(points.samples, points.lengths)
        above = points.where(new > fitted.floor)  # what only took long to launch says nothing of the law
        uncertain = Uncertainty.of(above, law, self._observed.noise)
        if math.isfinite(m_comp):
            error = uncertain.m_comp(law, self._target_sync) if self._target_sync else uncertain.power(self._longest)
            if abs(math.log(m_comp / now.budget.m_comp)) > max(TOLERANCE, CERTAIN * error):
                return f"compute budget {move}"
        ratio = np.log(new / now.step_time.predict(points.samples, points.lengths))
        ratio -= np.average(ratio, weights=points.weights)
        uneven = math.sqrt(float(np.average(ratio**2, weights=points.weights)))
        if uneven > max(TOLERANCE, CERTAIN * uncertain.costs(above, law)):
            return f"costs of shapes beside each other differ by {uneven:.1%}: compute budget {move}"
        return ""

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


def _describe(m_comp: float, p: float) -> str:
    return f"M_comp = {m_comp:.4g}, p = {p:.3f}"
