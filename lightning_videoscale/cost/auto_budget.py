"""`budget="auto"`: M_mem from measured peaks, M_comp from what it makes of the plan by measured costs.

Where nothing can be measured, costs come from the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from lightning_videoscale.cost.budget import BucketBudget, Budget
from lightning_videoscale.cost.calibration import Calibration
from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.matrix import ShapeMatrix
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.cost.step_time import StepTimeModel
from lightning_videoscale.cost.time_budget import TimeBudget

BestCompute = Callable[[BucketBudget, StepTimeModel | None, str], tuple[BucketBudget, str]]
"""From the smallest budget, the costs, and words for what that budget is, to the budget of the best plan, and why."""


@dataclass(frozen=True)
class AutoBudget:
    """How budgets are found.

    M_mem is what the measured peaks leave room for, below all that was out of memory. M_comp is what the longest sample
    alone takes, or up to twice that: the least that has the most tokens per predicted second, when a sample of the
    epoch is planned for the run's ranks, micro-batches and strategy. A ``target_sync`` that is named is kept instead,
    see `TimeBudget`. Memory and costs come from the first of these that there is: the ``matrix``; the
    file that `videoscale benchmark-shapes` left beside the index, if it was measured under the same strategy, precision
    and GPUs; a short benchmark at the start of ``fit`` on GPUs; else M_mem is the longest sample, and costs are the
    model's FLOPs. A run that goes on as it began keeps what it had, unless a ``matrix`` is named. On other ranks, in
    another precision, or where blocks are checkpointed, compiled or fused otherwise, it is found anew.

    Args:
        matrix: File of `videoscale benchmark-shapes`.
        target_sync: Seconds that a micro-batch may take. None: what makes the most of the ranks' time.
        reserve: Share of the memory that is kept free, beside the memory model's own worst error.

    Raises:
        ValueError: If the target is not a positive number, or the reserve no share below 1.
    """

    matrix: str | Path | None = None
    target_sync: float | None = None
    reserve: float = 0.05

    def __post_init__(self) -> None:
        if self.target_sync is not None and not 0 < self.target_sync < math.inf:
            raise ValueError(f"target_sync={self.target_sync} must be a positive number of seconds, or None.")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve} must be a share of the memory, from 0 to below 1.")

    def decide(
        self,
        longest: int,
        matrix: ShapeMatrix | None,
        source: str,
        step_time: StepTimeModel | None,
        module: nn.Module | None,
        best: BestCompute,
        accumulates: bool,
    ) -> tuple[Calibration, str]:
        """Finds costs, then M_mem, then M_comp.

        Args:
            longest: Tokens of the longest sample.
            matrix: What was measured; None where nothing was.
            source: Where that comes from, or why there is nothing.
            step_time: The user's own prediction of costs, which goes before a measured one.
            module: What trains the transformer, whose FLOPs are the costs where there are no others; None: unknown.
            best: Plans a sample of the epoch under some budgets.
            accumulates: Whether a step has several micro-batches on a rank.

        Returns:
            What to plan by, and the sentence that says so.

        Raises:
            ValueError: If a ``target_sync`` is named and there are no seconds, or not even one token fits.
        """
        notes = []
        if step_time is None and matrix is not None:
            step_time, note = _fitted_time(matrix)
            notes.append(note)
        if step_time is None and self.target_sync is not None:
            raise ValueError(
                f"target_sync={self.target_sync} s needs measured seconds, and budget='auto' finds its costs "
                f"{'; '.join([source, *notes])}: give matrix=, or step_time=."
            )
        has_seconds = step_time is not None
        if step_time is None and module is not None:
            step_time, note = step_time_of(module)
            notes.append(note)
        m_mem, overhead, from_peaks = self._m_mem(longest, matrix, accumulates)
        if step_time is not None and self.target_sync is not None:
            budget: Budget = TimeBudget(m_mem, self.target_sync, step_time, overhead_tokens=overhead)
            limit = str(budget)
        else:
            alone = replace(budget_of_longest(longest, step_time, m_mem), overhead_tokens=overhead)
            takes = f", {float(step_time.predict(1, longest)):.3g} s" if step_time is not None and has_seconds else ""
            sample = f"what one sample of {longest} tokens takes{takes}"
            budget, why = best(alone, step_time, sample)
            limit = f"{budget} ({why})"
        return Calibration(budget, step_time), (
            f"budget='auto', {source}: M_mem = {budget.m_mem:g} tokens ({from_peaks}), {limit}"
            f"{''.join(f'; {n}' for n in notes).rstrip('.')}."
        )

    def _m_mem(self, longest: int, matrix: ShapeMatrix | None, accumulates: bool) -> tuple[float, float, str]:
        """M_mem, the tokens that a sample takes beside its own, and the reason."""
        m_mem, overhead, why = self._by_peaks(longest, matrix, accumulates)
        bounded = m_mem if matrix is None else matrix.within_memory(m_mem, self.reserve, overhead)
        why = why if bounded == m_mem else f"instead of {m_mem:g}, which were out of memory: {why}"
        return bounded, overhead, why

    def _by_peaks(self, longest: int, matrix: ShapeMatrix | None, accumulates: bool) -> tuple[float, float, str]:
        if matrix is None or matrix.capacity_bytes is None:
            return longest, 0.0, "the longest sample, as no peaks are known"
        try:
            model = MemoryModel.fit(matrix.measurements, accumulates)
        except ValueError as error:
            return longest, 0.0, f"the longest sample, as the peaks cannot be used: {error}"
        overhead = round(model.overhead_tokens(matrix.capacity_bytes, self.reserve), 1)
        why = (
            f"{model.fixed / 2**30:.1f} GiB, {model.per_token / 2**10:.0f} KiB per token and as much as {overhead:g} "
            f"tokens per sample at the measured peaks, of {matrix.capacity_bytes / 2**30:.1f} GiB"
        )
        return model.m_mem(matrix.capacity_bytes, self.reserve), overhead, why


def budget_of_longest(longest: int, step_time: StepTimeModel | None, m_mem: float | None = None) -> BucketBudget:
    """The compute budget that one sample of the longest takes.

    Args:
        longest: Its tokens.
        step_time: Tells p; None: 2.
        m_mem: Memory budget in tokens; None: of that sample too.
    """
    # As the budget for its seconds would be, without the rounding of seconds.
    p = 2.0 if step_time is None else step_time.power_law.p
    return BucketBudget(longest if m_mem is None else m_mem, float(longest) ** p, p)


def step_time_of(module: nn.Module) -> tuple[StepTimeModel | None, str]:
    """The step-time model of the transformer that a module trains, by its FLOPs; None, and why, where none is told."""
    try:
        return StepTimeModel.analytic(TransformerFlops.of_module(module)), "costs are the FLOPs of its transformer"
    except ValueError as reason:
        return None, f"costs are B * S^2: {reason}"


def _fitted_time(matrix: ShapeMatrix) -> tuple[StepTimeModel | None, str]:
    try:
        model = StepTimeModel.fit(matrix.measurements)
    except ValueError as problem:
        return None, f"the measured times cannot be used: {problem}"
    error = min(model.power_law_error, model.additive_error)
    form = "sum" if model.form is model.additive else "power law"
    return model, f"costs by the {form}, {error:.1%} off held-out ones"
