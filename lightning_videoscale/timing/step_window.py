"""Some optimizer steps of all ranks, as one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_videoscale.timing.load import MicroBatchLoad
from lightning_videoscale.timing.step_times import StepTimes

FIELDS = (*StepTimes._fields, *MicroBatchLoad._fields)
"""The columns of a window's table."""

_SUMS = {"compute": ("forward", "backward"), "work": ("forward", "backward", "exchange")}


@dataclass(frozen=True)
class StepWindow:
    """What all ranks did in some optimizer steps; the same on every rank.

    Attributes:
        dp_ranks: Data-parallel rank of every rank.
        table: float64 of shape ``(ranks, micro_batches, fields)``: seconds of `StepTimes`, then the `MicroBatchLoad`,
            zeros where a batch does not tell.
        micro_batches: Of each step.
        values: What every rank's subscriber added to the gather, float64 of shape ``(ranks, values)``.
        in_slots: Whether ranks wait for each other in every micro-batch, as under FSDP2, and not only once a step.
    """

    dp_ranks: list[int]
    table: Tensor
    micro_batches: list[int]
    values: Tensor
    in_slots: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.micro_batches)

    @property
    def tells_loads(self) -> bool:
        """Whether every batch had a ``meta`` with its load: samples, and tokens of each."""
        return bool((self.column("samples") > 0).all() and (self.column("sequence_length") > 0).all())

    def column(self, name: str) -> Tensor:
        """Returns a field of every rank and micro-batch, (ranks, micro_batches).

        Args:
            name: One of `FIELDS`, or "compute" or "work", as `StepTimes` has them.
        """
        fields = _SUMS.get(name, (name,))
        return self.table[:, :, [FIELDS.index(field) for field in fields]].sum(dim=2)

    def of_groups(self, name: str) -> Tensor:
        """Returns a field of every data-parallel rank, (dp_ranks, micro_batches), in their order.

        Of seconds it is the largest in the sequence-parallel group: the group takes as long as its slowest rank. Loads
        are the same on all of its ranks.
        """
        values, ranks = self.column(name), torch.tensor(self.dp_ranks)
        return torch.stack([values[ranks == dp_rank].amax(dim=0) for dp_rank in sorted(set(self.dp_ranks))])

    def by_step(self, values: Tensor) -> Tensor:
        """Divides into steps, filled up with zeros: (ranks, micro_batches) becomes (ranks, steps, most of a step)."""
        return pad_sequence([part.T for part in values.split(self.micro_batches, dim=1)]).permute(2, 1, 0)

    def per_step(self, values: Tensor) -> Tensor:
        """Adds up micro-batches: (ranks, micro_batches) becomes (ranks, steps)."""
        return self.by_step(values).sum(dim=2)

    def per_wait(self, values: Tensor) -> Tensor:
        """Adds up what lies between two waits for other ranks: micro-batches of a step, unless ranks wait in each."""
        return values if self.in_slots else self.per_step(values)

    @property
    def work(self) -> Tensor:
        """Seconds that every data-parallel rank works in each step, (dp_ranks, steps)."""
        return self.per_step(self.of_groups("work"))

    @property
    def counted(self) -> Tensor:
        """Samples without fillers, (dp_ranks, micro_batches): those are no progress."""
        return self.of_groups("samples") * (self.of_groups("loss_weight") != 0)

    def loads(self, p: float) -> Tensor:
        """B * S**p of every data-parallel rank, added up over each step, (dp_ranks, steps)."""
        return self.per_step(self.of_groups("samples") * self.of_groups("sequence_length") ** p)

    @property
    def predicted_costs(self) -> Tensor | None:
        """The planner's, of every data-parallel rank and step, (dp_ranks, steps); None where a batch tells none."""
        costs = self.of_groups("predicted_cost")
        return self.per_step(costs) if bool((costs > 0).all()) else None

    @property
    def reduction(self) -> Tensor:
        """Seconds that the rank with the shortest wait waits, (micro_batches,): the collective itself takes them."""
        return self.column("wait").amin(dim=0)
