"""What a micro-batch may hold and what it costs: budgets now, measured step-time and memory models later."""

from lightning_videoscale.cost.budget import BucketBudget

__all__ = ["BucketBudget"]
