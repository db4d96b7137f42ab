"""How many samples of one sequence length take at most a given time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.step_time import StepTimeModel


@dataclass(frozen=True)
class TimeBudget(Budget):
    """The largest micro-batch of each length whose predicted time is at most a target.

    AdaptiveLoad inverts its power law for that: M_comp = (target_sync - a) / b, `StepTimeModel.budget`. Where the sum
    over tokens and pairs of tokens predicts held-out shapes better, this follows the sum.

    Args:
        m_mem: Memory budget M_mem in tokens: ``B * S`` stays at or below it.
        target_sync: Seconds that a micro-batch may take. One sample that takes longer trains alone.
        step_time: Predicts the seconds.
        overhead_tokens: Memory that every sample takes beside its tokens, in tokens, as of a `BucketBudget`.

    Raises:
        ValueError: If M_mem is not a positive number, the overhead is below 0, or the target is not above what any step
            takes.
    """

    target_sync: float
    step_time: StepTimeModel

    def __post_init__(self) -> None:
        self._check_memory()
        self._check("target_sync", may_be_infinite=True)
        if not self.target_sync > (least := max(self.step_time.form.a, self.step_time.floor)):
            raise ValueError(f"target_sync={self.target_sync} s is not above the {least:.4g} s that any step takes.")

    @property
    def p(self) -> float:
        """That of the power law; the sum has none."""
        return self.step_time.power_law.p

    def room(self, sequence_length: int | float) -> float:
        """Returns how many samples of this many tokens take ``target_sync``; both forms grow evenly with them."""
        form = self.step_time.form
        return (self.target_sync - form.a) / (float(form.predict(1, sequence_length)) - form.a)

    def cost(self, samples: int, sequence_length: int) -> float:
        """Predicted seconds of a micro-batch."""
        return float(self.step_time.predict(samples, sequence_length))

    @property
    def numbers(self) -> dict[str, float]:
        """M_mem, the target, and the p of the power law."""
        return {"m_mem": self.m_mem, "target_sync": self.target_sync, "p": self.p}

    def __str__(self) -> str:
        form = "sum" if self.step_time.form is self.step_time.additive else "power law"
        return f"target_sync = {self.target_sync:g} s by the {form}"
