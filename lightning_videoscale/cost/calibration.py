"""What a plan is made by: predicted costs and budgets, under one version."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_videoscale.cost.budget import BucketBudget, Budget
from lightning_videoscale.cost.step_time import StepTimeModel
from lightning_videoscale.cost.time_budget import TimeBudget


def read_budget(fields: Mapping[str, Any]) -> Budget:
    """Reads what `Budget.to_dict` returned, also from JSON, where no limit is null."""
    overhead = fields.get("overhead_tokens", 0.0)
    limit = fields["target_sync"] if "target_sync" in fields else fields["m_comp"]
    limit = math.inf if limit is None else limit
    if "target_sync" in fields:
        step_time = StepTimeModel.from_dict(fields["step_time"])
        return TimeBudget(fields["m_mem"], limit, step_time, overhead_tokens=overhead)
    return BucketBudget(fields["m_mem"], limit, fields["p"], overhead_tokens=overhead)


@dataclass(frozen=True)
class Calibration:
    """Costs and budgets that belong together.

    Attributes:
        budget: What a micro-batch may take.
        step_time: Predicts the seconds that are balanced; None balances B * S^p with the budget's p.
    """

    budget: Budget
    step_time: StepTimeModel | None = None

    @property
    def version(self) -> str:
        """Twelve hex digits that name these numbers."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON and checkpoints."""
        return {"budget": self.budget.to_dict(), "step_time": self.step_time.to_dict() if self.step_time else None}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Calibration:
        """Reads what `to_dict` returned."""
        step_time = StepTimeModel.from_dict(fields["step_time"]) if fields["step_time"] else None
        return cls(read_budget(fields["budget"]), step_time)
