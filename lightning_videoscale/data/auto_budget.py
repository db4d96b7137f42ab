"""`budget="auto"`: M_mem from measured peaks, M_comp from what it makes of the plan by measured costs.

Where nothing can be measured, costs come from the model's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.cost import (
    BucketBudget,
    Calibration,
    MemoryModel,
    ShapeMatrix,
    StepTimeModel,
    TransformerFlops,
)
from lightning_videoscale.data.benchmark.grid import spread_over_shapes
from lightning_videoscale.data.benchmark.measuring import DECISIVE, measure_shapes, provenance_of
from lightning_videoscale.data.benchmark.synthetic import SyntheticBatches
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.data.planning.compute_budgets import EQUAL, FACTORS, best_of, try_budgets
from lightning_videoscale.topology import waits_in_every_micro_batch

_SHORT = {"max_shapes": 6, "seconds": 0.3}
"""Of the benchmark at the start of fit: about a minute."""


@dataclass(frozen=True)
class AutoBudget:
    """How budgets are found.

    M_mem is what the measured peaks leave room for. M_comp is what the longest sample alone takes, or up to twice that:
    the least that has the most tokens per predicted second, when a sample of the epoch is planned for the run's ranks,
    micro-batches and strategy. A ``target_sync`` that is named is kept instead: M_comp = (target_sync - a) / b of the
    measured power law a + b * B * S^p. Memory and costs come from the first of these that there is: the ``matrix``; the
    file that `videoscale benchmark-shapes` left beside the index, if it was measured under the same strategy, precision
    and GPUs; a short benchmark at the start of ``fit`` on GPUs; else M_mem is the longest sample, and costs are the
    model's FLOPs. A run that goes on keeps what it began with, on however many ranks, unless a ``matrix`` is named.

    Args:
        matrix: File of `videoscale benchmark-shapes`.
        target_sync: Seconds that a micro-batch may take. None: what makes the most of the ranks' time.
        reserve: Share of the memory that is kept free, beside the memory model's own worst error.
    """

    matrix: str | Path | None = None
    target_sync: float | None = None
    reserve: float = 0.05


class BudgetSearch:
    """Finds the budget of one training; says once what it found, and why.

    Args:
        auto: How.
        planner: What the training will be planned by, but for budget and costs.
        batches: Batches of their shapes.
        beside_index: Where a matrix may lie.
        step_time: The user's own prediction of costs, which goes before a measured one.
    """

    def __init__(
        self,
        auto: AutoBudget,
        planner: BucketPlanner,
        batches: SyntheticBatches,
        beside_index: Path,
        step_time: StepTimeModel | None,
    ) -> None:
        self._auto = auto
        self._planner = planner
        self._lengths: list[int] = planner.table.sequence_lengths.tolist()
        self._batches = batches
        self._beside_index = beside_index
        self._step_time = step_time

    def run(self, trainer: pl.Trainer | None) -> Calibration:
        """Returns the calibration, the same on all ranks; collective where there is a Trainer.

        Raises:
            ValueError: If the matrix that was asked for cannot be read or used.
        """
        matrix, reason = self._matrix(trainer)
        # The user's own model first, then the measured one, then the one by the model's size.
        step_time, notes = self._step_time, []
        if step_time is None and matrix is not None:
            step_time, note = _fitted_time(matrix)
            notes.append(note)
        if step_time is None and self._auto.target_sync is not None:
            raise ValueError(
                f"target_sync={self._auto.target_sync} s needs measured seconds, and budget='auto' finds its costs "
                f"{reason}: give matrix=, or step_time=."
            )
        has_seconds = step_time is not None
        if step_time is None and trainer is not None:
            step_time, note = step_time_of(trainer.lightning_module)
            notes.append(note)
        m_mem, note = self._m_mem(matrix)
        in_slots = trainer is not None and waits_in_every_micro_batch(trainer)
        budget, why = self._budget(step_time, has_seconds, m_mem, in_slots)
        rank_zero_info(
            f"budget='auto', {reason}: M_mem = {budget.m_mem:g} tokens ({note}), M_comp = {budget.m_comp:.4g} tokens^"
            f"{budget.p:g} ({why}){''.join(f'; {n}' for n in notes).rstrip('.')}."
        )
        calibration = Calibration(budget, step_time)
        # The last bits of a fit may differ between processors, and all ranks must plan alike.
        return calibration if trainer is None else trainer.strategy.broadcast(calibration)

    def _budget(
        self, step_time: StepTimeModel | None, has_seconds: bool, m_mem: float, in_slots: bool
    ) -> tuple[BucketBudget, str]:
        """The budget and why, by costs that are seconds or else, by FLOPs, only in proportion to them."""
        longest, target = max(self._lengths), self._auto.target_sync
        if step_time is not None and target is not None:
            return step_time.budget(target, m_mem), f"target_sync = {target:g} s"
        # As the budget for the seconds of the longest sample would be, without the rounding of seconds.
        p = 2.0 if step_time is None else step_time.power_law.p
        alone = BucketBudget(m_mem, float(longest) ** p, p)
        tried = try_budgets(replace(self._planner, budget=alone, step_time=step_time))
        best = best_of(tried, in_slots)
        takes = f", {float(step_time.predict(1, longest)):.3g} s" if step_time is not None and has_seconds else ""
        sample = f"what one sample of {longest} tokens takes{takes}"
        now, before = best.figures, tried[0].figures
        works = f"ranks are predicted to work {now.at_work(in_slots):.1%} of the time"
        if best is tried[0]:
            return best.budget, (
                f"{sample}: {works}, and no budget up to {FACTORS[-1]:g} x this one that mixes shapes as well has "
                f"{EQUAL:.1%} more tokens per second"
            )
        return best.budget, (
            f"{best.factor:g} x {sample}: {works} instead of {before.at_work(in_slots):.1%}, "
            f"{now.throughput(in_slots) / before.throughput(in_slots) - 1:+.1%} tokens per second, "
            f"{now.samples / now.steps:.0f} samples a step instead of {before.samples / before.steps:.0f}"
        )

    def _m_mem(self, matrix: ShapeMatrix | None) -> tuple[float, str]:
        longest = max(self._lengths)
        if matrix is None or matrix.capacity_bytes is None:
            return longest, "the longest sample, as no peaks are known"
        try:
            model = MemoryModel.fit(matrix.measurements)
        except ValueError as error:
            return longest, f"the longest sample, as the peaks cannot be used: {error}"
        return model.m_mem(matrix.capacity_bytes, self._auto.reserve), (
            f"{model.fixed / 2**30:.1f} GiB and {model.per_token / 2**10:.0f} KiB per token at the measured peaks, of "
            f"{matrix.capacity_bytes / 2**30:.1f} GiB"
        )

    def _matrix(self, trainer: pl.Trainer | None) -> tuple[ShapeMatrix | None, str]:
        """What was measured, and where it comes from or why there is nothing."""
        if self._auto.matrix is not None:
            matrix, problem = _read(trainer, Path(self._auto.matrix))
            if matrix is None:
                raise ValueError(f"AutoBudget(matrix=...): {problem}")
            if trainer is not None and (differences := matrix.differences(provenance_of(trainer), DECISIVE)):
                rank_zero_warn(f"{self._auto.matrix} was measured in another setting ({'; '.join(differences)}).")
            return matrix, f"by {self._auto.matrix}"
        matrix, problem = _read(trainer, self._beside_index)
        if matrix is not None and trainer is not None:
            differences = matrix.differences(provenance_of(trainer), DECISIVE)
            if not differences:
                return matrix, f"by {self._beside_index}"
            rank_zero_info(f"{self._beside_index} is of another setting ({'; '.join(differences)}) and is not used.")
        if (obstacle := _obstacle(trainer)) is None:
            assert trainer is not None
            rank_zero_info("budget='auto': measuring the shapes of the data, about a minute.")
            cells = spread_over_shapes(self._planner.table.shapes, self._lengths, int(_SHORT["max_shapes"]))
            measured = measure_shapes(trainer, cells, self._batches, _SHORT["seconds"])
            return measured, f"measured on {len(measured.measurements)} micro-batches"
        return None, f"by the model's size, as {obstacle}"


def step_time_of(module: pl.LightningModule) -> tuple[StepTimeModel | None, str]:
    """The step-time model of the transformer that a module trains, by its FLOPs; None, and why, where none is told."""
    try:
        return StepTimeModel.analytic(TransformerFlops.of_module(module)), "costs are the FLOPs of its transformer"
    except ValueError as reason:
        return None, f"costs are B * S^2: {reason}"


def _read(trainer: pl.Trainer | None, file: Path) -> tuple[ShapeMatrix | None, str]:
    """What rank 0 reads, on all ranks: the file may lie on its node only."""
    found: tuple[ShapeMatrix | None, str] = None, ""
    if trainer is None or trainer.is_global_zero:
        try:
            found = ShapeMatrix.load(file), ""
        except (OSError, ValueError) as error:
            found = None, str(error)
    return found if trainer is None else trainer.strategy.broadcast(found)


def _fitted_time(matrix: ShapeMatrix) -> tuple[StepTimeModel | None, str]:
    try:
        model = StepTimeModel.fit(matrix.measurements)
    except ValueError as problem:
        return None, f"the measured times cannot be used: {problem}"
    error = min(model.power_law_error, model.additive_error)
    return (
        model,
        f"costs by the {'sum' if model.form is model.additive else 'power law'}, {error:.1%} off held-out ones",
    )


def _obstacle(trainer: pl.Trainer | None) -> str | None:
    """Why no steps can be measured; a warning with the remedy where there are GPUs."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return "no training is set up"
    if trainer.strategy.root_device.type != "cuda":
        return f"nothing is measured on {trainer.strategy.root_device}"
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        return "fast_dev_run is on"
    obstacles: Sequence[tuple[bool, str]] = (
        (not trainer.lightning_module.automatic_optimization, "the module optimizes manually"),
        (not trainer.optimizers, "configure_optimizers asks for the number of steps, before any can be measured"),
        (hasattr(trainer.strategy, "deepspeed_engine"), "DeepSpeed keeps the gradients of steps that are not taken"),
    )
    for holds, why in obstacles:
        if holds:
            rank_zero_warn(f"budget='auto' measures nothing: {why}. Run `videoscale benchmark-shapes` beforehand.")
            return why
    return None
