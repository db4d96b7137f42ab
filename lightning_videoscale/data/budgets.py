"""The budgets and costs that a DataModule plans by: given, found by `budget="auto"`, or adopted while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_videoscale.cost import BucketBudget, Calibration, StepTimeModel
from lightning_videoscale.data.auto_budget import AutoBudget, BudgetSearch, step_time_of
from lightning_videoscale.data.planning import SampleTable

Budget = BucketBudget | AutoBudget | Literal["auto"]


class Budgets:
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

    def __init__(self, budget: Budget, step_time: StepTimeModel | None) -> None:
        if budget != "auto" and not isinstance(budget, (BucketBudget, AutoBudget)):
            raise ValueError(f"budget={budget!r} must be 'auto', a BucketBudget or an AutoBudget.")
        self.training = budget if isinstance(budget, BucketBudget) else None
        self.step_time = step_time
        self._auto = None if isinstance(budget, BucketBudget) else AutoBudget() if budget == "auto" else budget
        self._found: Calibration | None = None
        self._adopted: Calibration | None = None

    def find(self, search: Callable[[AutoBudget], BudgetSearch], trainer: pl.Trainer | None) -> BucketBudget | None:
        """Searches where nothing is known yet; collective where there is a Trainer.

        Args:
            search: Makes the search.
            trainer: Under which to measure.

        Returns:
            What was found; None where the budget was known.
        """
        if self.training is not None or self._auto is None:
            return None
        self._found = search(self._auto).run(trainer)
        self._use(self._found)
        return self.training

    def adopt(self, calibration: Calibration) -> None:
        """Lets other costs and budgets count from now on."""
        self._adopted = calibration
        self._use(calibration)

    def of(
        self, table: SampleTable, trainer: pl.Trainer | None, is_training: bool
    ) -> tuple[BucketBudget, StepTimeModel | None]:
        """The budget and the costs to plan a table by.

        Where budgets are found, nobody measures what batches take that nothing is trained on: they hold no more than
        the longest sample does.
        """
        step_time = self.step_time
        if step_time is None and trainer is not None:
            step_time, _ = step_time_of(trainer.lightning_module)
        budget = self.training if is_training or self._auto is None else None
        return budget if budget is not None else _of_longest(table, step_time), step_time

    def state_dict(self) -> dict[str, Any]:
        """Returns what was found and adopted, for the checkpoint."""
        kept = {"calibration": self._adopted, "found_budget": self._found}
        return {name: calibration.to_dict() for name, calibration in kept.items() if calibration is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets count again what the checkpoint holds; a matrix that is named now goes before what was found then."""
        if "found_budget" in state and self._auto is not None and self._auto.matrix is None:
            self._found = Calibration.from_dict(state["found_budget"])
            self._use(self._found)
        if "calibration" in state:
            self.adopt(Calibration.from_dict(state["calibration"]))

    def _use(self, calibration: Calibration) -> None:
        self.training, self.step_time = calibration.budget, calibration.step_time


def _of_longest(table: SampleTable, step_time: StepTimeModel | None) -> BucketBudget:
    """What the longest sample alone takes, which must fit in any case."""
    longest = int(table.sequence_lengths.max())
    p = step_time.power_law.p if step_time is not None else 2.0
    return BucketBudget(longest, float(longest) ** p, p)
