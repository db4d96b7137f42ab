"""What the ranks of a benchmark tell each other, beside the communicators of the model."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from datetime import timedelta

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_videoscale.topology import topology_of

_PATIENCE = timedelta(minutes=5)


class Ranks:
    """Small agreements over a gloo group of its own; collective to create, as is every call.

    A rank that is out of memory within a step must be able to say so while others wait for it in a collective of the
    model; those then fail in time, and nobody waits for ever.

    Args:
        trainer: Whose ranks.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._size = trainer.world_size
        self._closing = ExitStack()
        self._group = (
            self._closing.enter_context(topology_of(trainer).host_group(_PATIENCE)) if self._size > 1 else None
        )

    def all(self, mine: bool, otherwise: str) -> bool:
        """Whether it holds on all ranks.

        Args:
            mine: Whether it holds on this one.
            otherwise: What to say if it does not, and the others do not come to hear of it.

        Raises:
            RuntimeError: If the others do not come.
        """
        try:
            return bool(min(self._gather(float(mine))))
        except RuntimeError as error:
            if not mine:
                error.add_note(
                    f"This rank was {otherwise}, and the others were within the step. Leave out such shapes."
                )
            raise

    def smallest(self, mine: float | None) -> float | None:
        """The smallest of all ranks' numbers; None where they have none."""
        return None if mine is None else min(self._gather(mine))

    def largest(self, mine: float) -> float:
        """The largest of all ranks' numbers."""
        return max(self._gather(mine))

    def largest_of(self, mine: float | None) -> float | None:
        """As `largest`; None where they have none."""
        return None if mine is None else self.largest(mine)

    def median(self, mine: float) -> float:
        """The median of all ranks' numbers: one slow rank does not make a shape dear."""
        return statistics.median(self._gather(mine))

    def close(self) -> None:
        """Gives the group up."""
        self._closing.close()

    def _gather(self, mine: float) -> list[float]:
        if self._group is None:
            return [mine]
        everyone = [torch.zeros(1, dtype=torch.float64) for _ in range(self._size)]
        dist.all_gather(everyone, torch.tensor([mine], dtype=torch.float64), group=self._group)
        return [float(x) for x in everyone]
