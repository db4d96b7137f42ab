"""The optimizer steps from one report to the next: collected on every rank, then brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_videoscale.callbacks.gathering import gather_rows
from lightning_videoscale.timing import StepTimes, watch_steps
from lightning_videoscale.topology import topology_of

_STEPS_BETWEEN_REPORTS_WITHOUT_LOGGING = 50


@dataclass(frozen=True)
class RankTimes:
    """What all ranks did in some optimizer steps.

    Attributes:
        dp_ranks: Data-parallel rank of every rank.
        times: Seconds, float64 of shape ``(ranks, micro_batches, 7)``: `StepTimes`.
        loads: What each rank noted of its micro-batches, float64 of shape ``(ranks, micro_batches, columns)``.
        micro_batches: Of each step.
    """

    dp_ranks: list[int]
    times: Tensor
    loads: Tensor
    micro_batches: list[int]

    def part(self, phase: str) -> Tensor:
        """Returns the seconds of a field of `StepTimes`, or of "compute", per micro-batch: (ranks, micro_batches)."""
        if phase == "compute":
            return self.part("forward") + self.part("backward")
        return self.times[:, :, StepTimes._fields.index(phase)]

    def per_step(self, values: Tensor) -> Tensor:
        """Adds up micro-batches: (ranks, micro_batches) becomes (ranks, steps)."""
        return self.by_step(values).sum(dim=2)

    def by_step(self, values: Tensor) -> Tensor:
        """Divides into steps, filled up with zeros: (ranks, micro_batches) becomes (ranks, steps, most of a step)."""
        return pad_sequence([part.T for part in values.split(self.micro_batches, dim=1)]).permute(2, 1, 0)

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of every data-parallel rank, that is, of every sequence-parallel group."""
        return [
            [rank for rank, dp_rank in enumerate(self.dp_ranks) if dp_rank == wanted]
            for wanted in sorted(set(self.dp_ranks))
        ]

    def of_slowest_peers(self, values: Tensor) -> Tensor:
        """Keeps the largest value of every sequence-parallel group: (ranks, ...) becomes (dp_ranks, ...)."""
        return torch.stack([values[group].amax(dim=0) for group in self.groups])

    def of_first_peers(self, values: Tensor) -> Tensor:
        """Keeps one value of every sequence-parallel group, all of whose ranks have the same."""
        return values[[group[0] for group in self.groups]]


class StepWindow:
    """Collects this rank's micro-batches until a number of optimizer steps is complete, then those of all ranks.

    Args:
        trainer: The Trainer, in ``on_train_start``.
        every_n_steps: Optimizer steps of a window; None: the Trainer's ``log_every_n_steps``.
    """

    def __init__(self, trainer: pl.Trainer, every_n_steps: int | None) -> None:
        log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        self._interval = every_n_steps or log_every_n_steps or _STEPS_BETWEEN_REPORTS_WITHOUT_LOGGING
        self._watch = watch_steps(trainer)
        self._dp_rank = topology_of(trainer).data_parallel_rank
        self._global_step = trainer.global_step
        self._loads: list[Sequence[float]] = []
        self._times: list[StepTimes] = []
        self._micro_batches: list[int] = []

    def add(self, trainer: pl.Trainer, load: Sequence[float] = ()) -> None:
        """Notes a micro-batch, in ``on_train_batch_end``.

        Args:
            trainer: The Trainer.
            load: What to bring together beside its times; always as many numbers.
        """
        self._loads.append(load)
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._micro_batches.append(len(self._loads) - sum(self._micro_batches))

    @property
    def steps(self) -> int:
        """Optimizer steps that are complete."""
        return len(self._micro_batches)

    @property
    def is_full(self) -> bool:
        """Whether there are as many as a window has."""
        return self.steps >= self._interval

    def gather(self, trainer: pl.Trainer) -> RankTimes:
        """Returns the complete steps of all ranks, on every rank, and forgets them; a collective."""
        steps, self._micro_batches = self._micro_batches, []
        count = sum(steps)
        self._times += self._watch.read()
        rows = [(self._dp_rank, *times, *load) for times, load in zip(self._times, self._loads, strict=True)][:count]
        del self._times[:count], self._loads[:count]
        everything = gather_rows(trainer, torch.tensor(rows, dtype=torch.float64))
        end_of_times = 1 + len(StepTimes._fields)
        dp_ranks = [int(rank) for rank in everything[:, 0, 0].tolist()]
        return RankTimes(dp_ranks, everything[:, :, 1:end_of_times], everything[:, :, end_of_times:], steps)

    def close(self) -> None:
        """Lets go of the clock."""
        self._watch.close()


def check_interval(every_n_steps: int | None) -> int | None:
    """Returns a number of steps.

    Raises:
        ValueError: It is below 1.
    """
    if every_n_steps is not None and every_n_steps < 1:
        raise ValueError(f"every_n_steps must be at least 1, or None; got {every_n_steps}.")
    return every_n_steps
