"""What a plan is made by: predicted costs and budgets, under one version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.step_time import StepTimeModel


@dataclass(frozen=True)
class Calibration:
    """Costs and budgets that belong together.

    Attributes:
        budget: M_mem, M_comp and p.
        step_time: Predicts the seconds that are balanced; None balances B * S^p with the budget's p.
    """

    budget: BucketBudget
    step_time: StepTimeModel | None = None

    @property
    def version(self) -> str:
        """Twelve hex digits that name these numbers."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON and checkpoints."""
        return {"budget": asdict(self.budget), "step_time": self.step_time.to_dict() if self.step_time else None}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Calibration:
        """Reads what `to_dict` returned."""
        step_time = StepTimeModel.from_dict(fields["step_time"]) if fields["step_time"] else None
        return cls(BucketBudget(**fields["budget"]), step_time)
