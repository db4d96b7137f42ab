"""The budget and the costs that a DataModule plans by: given, found by `budget="auto"`, or adopted while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_videoscale.cost import BucketBudget, Calibration, MemoryModel, ShapeMatrix, StepTimeModel, TimeBudget
from lightning_videoscale.cost.auto_budget import AutoBudget, budget_of_longest, step_time_of
from lightning_videoscale.cost.benchmark.grid import SyntheticBatches, spread_over_shapes
from lightning_videoscale.cost.benchmark.known_matrix import known_matrix
from lightning_videoscale.cost.benchmark.measure_shapes import DECISIVE, measure_shapes, provenance_of
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.matrix import differences
from lightning_videoscale.data.planning import BucketPlanner, SampleTable
from lightning_videoscale.data.planning.compute_budget import best_of, explain, try_budgets
from lightning_videoscale.topology import waits_in_every_micro_batch

BudgetArgument = BucketBudget | TimeBudget | AutoBudget | Literal["auto"]

_MAX_SHAPES, _SECONDS = 6, 0.3
"""Of the benchmark at the start of fit: about a minute."""


class RunBudget:
    """What counts now.

    Args:
        budget: As given to the DataModule.
        step_time: Likewise.

    Raises:
        ValueError: If the budget is nothing that is known.

    Attributes:
        training: The budget of training batches; None until it is found.
        step_time: Predicts costs; None: by the model's size, or by B * S^p.
    """

    def __init__(self, budget: BudgetArgument, step_time: StepTimeModel | None) -> None:
        if budget != "auto" and not isinstance(budget, (Budget, AutoBudget)):
            raise ValueError(f"budget={budget!r} must be 'auto', a BucketBudget, a TimeBudget or an AutoBudget.")
        self._given = budget if isinstance(budget, Budget) else None
        self.training: Budget | None = self._given
        self.step_time = budget.step_time if step_time is None and isinstance(budget, TimeBudget) else step_time
        self._auto = None if isinstance(budget, Budget) else AutoBudget() if budget == "auto" else budget
        self._given_step_time = self.step_time
        self._found: Calibration | None = None
        self._found_under: dict[str, Any] | None = None  # which machine, strategy and model
        self._adopted: Calibration | None = None
        self._adopted_for_all: Calibration | None = None

    def find(
        self,
        trainer: pl.Trainer | None,
        make_planner: Callable[[], BucketPlanner],
        make_batches: Callable[[], tuple[SampleTable, SyntheticBatches]],
        beside_index: Path,
    ) -> Budget | None:
        """Finds what is not known yet, says once what and why; collective where there is a Trainer.

        Args:
            trainer: Under which to measure.
            make_planner: Makes what the training will be planned by, but for budget and costs.
            make_batches: Makes its samples, and batches of their shapes to measure with.
            beside_index: Where a matrix may lie.

        Returns:
            What was found; None where the budget was known.

        Raises:
            ValueError: If the matrix that was asked for cannot be read or used.
        """
        if trainer is not None:
            self._forget_if_elsewhere(trainer)
        if self.training is not None or self._auto is None:
            return None
        planner = make_planner()
        lengths = planner.table.sequence_lengths.tolist()

        def measure() -> Any:
            assert trainer is not None
            cells = spread_over_shapes(planner.table.shapes, lengths, _MAX_SHAPES)
            return measure_shapes(trainer, cells, make_batches()[1], _SECONDS)

        def best(smallest: BucketBudget, costs: StepTimeModel | None, words: str) -> tuple[BucketBudget, str]:
            tried = try_budgets(replace(planner, budget=smallest, step_time=costs))
            chosen = best_of(tried, in_slots)
            return chosen.budget, explain(tried, chosen, in_slots, words)

        in_slots = trainer is not None and waits_in_every_micro_batch(trainer)
        matrix, source = known_matrix(trainer, self._auto.matrix, beside_index, measure)
        module = None if trainer is None else trainer.lightning_module
        accumulates = planner.micro_batches > 1
        found, why = self._auto.decide(max(lengths), matrix, source, self.step_time, module, best, accumulates)
        rank_zero_info(why)
        # The last bits of a fit may differ between processors, and all ranks must plan alike.
        self._found = found if trainer is None else trainer.strategy.broadcast(found)
        self._found_under = None if trainer is None else provenance_of(trainer)
        self._use(self._found)
        return self.training

    def tokens_per_device(self, beside_index: Path) -> float | None:
        """How many tokens a device holds: M_mem as given, or that of a measured matrix over its ranks of a sequence.

        Returns:
            0 where not even one fits; None where neither is there, or the matrix has no peaks.

        Raises:
            ValueError: If there is a matrix that cannot be read or used, or none under the name that was given.
        """
        if self._auto is None:
            if self.training is None:
                return None
            return max(0.0, self.training.m_mem - self.training.overhead_tokens)
        file, reserve = self._auto.matrix or beside_index, self._auto.reserve
        try:
            matrix = ShapeMatrix.load(file)
            if matrix.capacity_bytes is None:
                return None
            model = MemoryModel.fit(matrix.measurements)
            by_peaks = model.m_mem(matrix.capacity_bytes, reserve)
        except (OSError, ValueError) as problem:
            if self._auto.matrix is None and isinstance(problem, FileNotFoundError):
                return None
            raise ValueError(f"{file} does not tell how many tokens a device holds: {problem}") from problem
        overhead = model.overhead_tokens(matrix.capacity_bytes, reserve)
        held = matrix.within_memory(by_peaks, reserve, overhead) - overhead
        return max(0.0, held) / int(matrix.provenance.get("sequence_parallel_size", 1))

    def adopt(self, calibration: Calibration, for_one_run: bool = False) -> None:
        """Lets other costs and budgets count from now on.

        Args:
            calibration: Which.
            for_one_run: Whether they are of the run under way, and others begin without them.
        """
        self._adopted = calibration
        if not for_one_run:
            self._adopted_for_all = calibration
        self._use(calibration)

    def begin_anew(self) -> None:
        """Forgets what was adopted for one run: the next may be of another model."""
        self._adopted = self._adopted_for_all
        self.training, self.step_time = self._given, self._given_step_time
        if (known := self._adopted or self._found) is not None:
            self._use(known)

    def of(
        self, table: SampleTable, trainer: pl.Trainer | None, is_training: bool
    ) -> tuple[Budget, StepTimeModel | None]:
        """The budget and the costs to plan a table by.

        Where budgets are found, nobody measures what batches take that nothing is trained on: they hold no more than
        the longest sample does.
        """
        step_time = self.step_time
        if step_time is None and trainer is not None:
            step_time, _ = step_time_of(trainer.lightning_module)
        budget = self.training if is_training or self._auto is None else None
        return budget or budget_of_longest(int(table.sequence_lengths.max()), step_time), step_time

    def state_dict(self) -> dict[str, Any]:
        """Returns what was found and adopted, and what was given before, for the checkpoint."""
        kept = {"calibration": self._adopted, "found_budget": self._found}
        state: dict[str, Any] = {name: each.to_dict() for name, each in kept.items() if each is not None}
        if self._adopted is not None and self._given is not None:
            state["given_budget"] = self._given.to_dict()
        return state | ({"found_under": self._found_under} if self._found_under is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets count again what the checkpoint holds; a matrix that is named now goes before what was found then."""
        if "found_budget" in state and self._auto is not None and self._auto.matrix is None:
            self._found, self._found_under = Calibration.from_dict(state["found_budget"]), state.get("found_under")
            self._use(self._found)
        if "calibration" in state:
            self.adopt(Calibration.from_dict(state["calibration"]), for_one_run=True)
            if self._given is not None and self._given.to_dict() != state.get("given_budget"):
                rank_zero_info(
                    f"The budget given now, {self._given}, does not count: the checkpoint's does, {self.training}, "
                    "which was adopted in training."
                )

    def _forget_if_elsewhere(self, trainer: pl.Trainer) -> None:
        """Forgets a budget that was found on another machine, or for another model, and not adopted since."""
        if self._found is None or self._found_under is None or self._adopted is not None:
            return
        if changed := differences(self._found_under, provenance_of(trainer), DECISIVE):
            rank_zero_info(f"The checkpoint's budget was found elsewhere ({'; '.join(changed)}): it is found anew.")
            self._found, self.training, self.step_time = None, None, self._given_step_time

    def _use(self, calibration: Calibration) -> None:
        self.training, self.step_time = calibration.budget, calibration.step_time
