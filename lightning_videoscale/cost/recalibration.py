"""Corrects costs and budgets by what a run observes.

From all ranks' times for their micro-batches, remembered with the ranks' own speeds taken out (`ObservedCosts`), follow

- the power law a + b * B * S^p, whose p moves by `P_STEP` at most at a time, and the additive form;
- the time that a micro-batch may take: with a target in seconds, what is predicted to take as long (`TimeBudget`);
  without one, M_comp, which keeps room for as many of the longest samples as in the first budget, n * S^p. The longest
  micro-batch moves by `BATCH_STEP` at most at a time;
- M_mem, from peaks of memory, by `MEMORY_STEP` at most at a time.

What observations leave open, as where all micro-batches hold equally many tokens, is kept as it was (`prior`). A change
that is small (`TOLERANCE`), or that noise may have made (`CERTAIN`), is left alone: hysteresis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lightning_videoscale.cost.budget import BucketBudget, Budget
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.cost.observations import ObservedCosts
from lightning_videoscale.cost.points import Points, Vector
from lightning_videoscale.cost.prior import open_points
from lightning_videoscale.cost.step_time import PowerLaw, StepTimeModel
from lightning_videoscale.cost.time_budget import TimeBudget
from lightning_videoscale.cost.weighted_fit import P_BOUNDS, Uncertainty, fit_step_time

P_STEP = 0.08
"""Most that p moves at a time."""
BATCH_STEP = 1.5
"""Most that the time of a micro-batch grows or shrinks at a time, as a factor of B at the longest sample."""
MEMORY_STEP = 1.25
"""Most that M_mem grows or shrinks at a time: larger batches are tried before they are extrapolated from."""
TOLERANCE = 0.03
"""Relative change of the budget, or of predicted costs beside each other, that is worth a new plan."""
CERTAIN = 2.5
"""Standard errors that such a change must have."""
MEMORY_TOLERANCE = 0.1
"""Relative change of M_mem that is worth a new plan, where the memory has room for what holds."""
SLOW = 1.1
"""Speed from which a rank is called slow."""

_SHAPES_FOR_A_LINE = 3
_RESERVE = 0.08  # of the memory; the allocator's gaps need some


class RecalibrationOutcome(NamedTuple):
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
        target_sync: Seconds that a micro-batch may take. None keeps what the first budget means: its own seconds, or
            room for so many samples of the longest.
        longest: Tokens of the longest sample. None: as many as the first M_comp has room for one of, or M_mem.

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
        budget = calibration.budget
        self._names_target = target_sync is not None
        self._target_sync = (
            budget.target_sync if target_sync is None and isinstance(budget, TimeBudget) else target_sync
        )
        if longest is None:
            one_fits = budget.m_comp ** (1 / budget.p) if isinstance(budget, BucketBudget) else math.inf
            longest = max(1.0, budget.m_mem - budget.overhead_tokens) if math.isinf(one_fits) else one_fits
        self._longest = longest
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
            self.calibration = replace(self.calibration, budget=replace(budget, m_mem=self._m_mem_limit))

    def update(
        self,
        observations: Sequence[Measurement],
        peaks: Mapping[int, float] | None = None,
        capacity: float | None = None,
    ) -> RecalibrationOutcome:
        """Takes in a window, and says what is to hold from now on.

        Args:
            observations: Of all ranks; those whose seconds are not finite and positive are left out.
            peaks: Highest memory in bytes by what the micro-batch that took it takes of M_mem, `Budget.memory_tokens`.
            capacity: Memory of the smallest device, in bytes.
        """
        now = self.calibration
        budget, step_time, reasons = now.budget, now.step_time, list[str]()
        try:
            self._observed.add(observations)
            left_open = open_points(self._observed.points(), self._observed.noise, self._held)
            self.fitted = self._fit(self._observed.points().beside(left_open))
            wanted = self._time_budget(self.fitted)
            if reason := self._difference(self.fitted, wanted):
                step_time, budget = self.fitted, wanted
                reasons.append(reason)
            if count := len(left_open.lengths):
                reasons.append(f"kept as they were, since B and S vary together: costs of {count} other batch sizes")
        except ValueError as error:
            reasons.append(f"costs stay: {error}")
        m_mem, reason = self._memory_budget(peaks or {}, capacity)
        if m_mem != budget.m_mem:
            budget = replace(budget, m_mem=m_mem)
            reasons.append(reason)
        self.calibration = Calibration(budget, step_time)
        slow = [str(rank) for rank, speed in self.speeds.items() if speed > SLOW]
        if slow:
            reasons.append(f"slow, and no reason to change costs: data-parallel rank {', '.join(slow)}")
        changed = self.calibration != now
        return RecalibrationOutcome(
            self.calibration, changed, "; ".join(reasons) or "within the tolerance of what holds"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next update depends on, as plain numbers."""
        return {
            "calibration": self.calibration.to_dict(),
            "target_sync": self._target_sync,
            "fitted": self.fitted.to_dict() if self.fitted else None,
            "observed": self._observed.state_dict(),
            "peaks": [[*item] for item in self._peaks.items()],
            "m_mem_limit": self._m_mem_limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.calibration = Calibration.from_dict(state["calibration"])
        if not self._names_target:  # one that is named now goes before that of the checkpoint
            self._target_sync = state.get("target_sync", self._target_sync)
        self.fitted = StepTimeModel.from_dict(state["fitted"]) if state["fitted"] else None
        self._observed.load_state_dict(state["observed"])
        self._peaks = dict(state["peaks"])
        self._m_mem_limit = state["m_mem_limit"]

    def forget_memory(self) -> None:
        """Forgets peaks and limits of M_mem, which hold for one kind of machine."""
        self._peaks, self._m_mem_limit = {}, math.inf

    def _fit(self, points: Points) -> StepTimeModel:
        """The fit to points; where M_comp is in tokens to the power p, with p near what holds."""
        p = self.calibration.budget.p
        free = fit_step_time(points)
        if self._target_sync is not None:
            return free
        low, high = (min(max(bound, P_BOUNDS[0]), P_BOUNDS[1]) for bound in (p - P_STEP, p + P_STEP))
        return free if low <= free.power_law.p <= high else fit_step_time(points, (low, high))

    def _held(self, samples: Vector, lengths: Vector) -> Vector:
        """Seconds by what holds, or costs by its budget."""
        now = self.calibration
        if now.step_time is not None:
            return now.step_time.predict(samples, lengths)
        return np.array([now.budget.cost(int(b), int(s)) for b, s in zip(samples, lengths, strict=True)], np.float64)

    def _time_budget(self, fitted: StepTimeModel) -> Budget:
        """The budget by a fit, whose room for the longest sample moves by `BATCH_STEP` at most."""
        before, p = self.calibration.budget, fitted.power_law.p
        # How many samples of one length there is room for is what budgets of all kinds have in common.
        room = before.room(self._longest)
        if self._target_sync is None:
            return BucketBudget(before.m_mem, room * self._longest**p, p, overhead_tokens=before.overhead_tokens)
        if math.isinf(room):  # memory alone has decided so far
            room = before.m_mem / before.memory_tokens(1, self._longest)
        wanted = TimeBudget(before.m_mem, self._target_sync, fitted, overhead_tokens=before.overhead_tokens)
        least, most = (float(fitted.form.predict(room * step, self._longest)) for step in (1 / BATCH_STEP, BATCH_STEP))
        return replace(wanted, target_sync=min(max(wanted.target_sync, least), most))

    def _difference(self, fitted: StepTimeModel, wanted: Budget) -> str:
        """Why the fit is worth a new plan, or nothing."""
        now, points, law = self.calibration, self._observed.points(), fitted.power_law
        move = f"from {now.budget} to {wanted}"
        if now.step_time is None:
            return f"first fit, of {len(self._observed)} observed shapes: {move}"
        new = fitted.predict(points.samples, points.lengths)
        above = points.where(new > fitted.floor)  # what only took long to launch says nothing of the law
        uncertain = Uncertainty.of(above, law, self._observed.noise)
        if self._differs(now.budget, wanted, uncertain, law):
            return move
        ratio = np.log(new / now.step_time.predict(points.samples, points.lengths))
        ratio -= np.average(ratio, weights=points.weights)
        uneven = math.sqrt(float(np.average(ratio**2, weights=points.weights)))
        if uneven > max(TOLERANCE, CERTAIN * uncertain.costs(above, law)):
            return f"costs of shapes beside each other differ by {uneven:.1%}: {move}"
        return ""

    def _differs(self, before: Budget, wanted: Budget, uncertain: Uncertainty, law: PowerLaw) -> bool:
        """Whether a budget is another one, beyond what noise makes of it."""
        if isinstance(before, BucketBudget) and isinstance(wanted, BucketBudget):
            if math.isinf(wanted.m_comp):
                return False
            change, error = wanted.m_comp / before.m_comp, uncertain.power(self._longest)
        elif isinstance(before, TimeBudget) and isinstance(wanted, TimeBudget):
            change = wanted.room(self._longest) / before.room(self._longest)
            error = uncertain.room(law, wanted.target_sync, self._longest)
        else:
            return True
        return abs(math.log(change)) > max(TOLERANCE, CERTAIN * error)

    def _memory_budget(self, peaks: Mapping[int, float], capacity: float | None) -> tuple[float, str]:
        """M_mem and the reason for it."""
        before = self.calibration.budget.m_mem
        for tokens, peak in peaks.items():
            self._peaks[tokens] = max(peak, self._peaks.get(tokens, 0.0))
        if capacity is None or len(self._peaks) < _SHAPES_FOR_A_LINE:
            return before, ""
        try:
            model = MemoryModel.fit([Measurement(1, tokens, 0.0, peak) for tokens, peak in self._peaks.items()])
        except ValueError:  # the peaks do not grow with the tokens yet
            return before, ""
        fits = model.fits(capacity, _RESERVE)
        least = max(before / MEMORY_STEP, 1.0)  # a budget is positive, even where not one token fits
        most = max(before * MEMORY_STEP, before + 1.0)  # a quarter of a few tokens is none
        wanted = min(max(float(fits), least), most, self._m_mem_limit)
        # The tolerance is wider than the reserve, and no reason to keep what does not fit.
        if abs(math.log(wanted / before)) <= MEMORY_TOLERANCE and before <= model.fits(capacity, reserve=0.0):
            return before, ""
        reason = f"M_mem from {before:.0f} to {wanted:.0f} tokens, by peaks of {len(self._peaks)} sizes"
        if not fits:
            reason += f": {model.fixed / 2**30:.1f} of {capacity / 2**30:.1f} GiB are taken before the first token"
        return float(int(wanted)), reason
