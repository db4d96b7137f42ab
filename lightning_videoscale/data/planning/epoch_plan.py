"""A plan as data: who trains on what, when."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.micro_batch import BatchMeta, MicroBatch
from lightning_videoscale.data.planning.table import SampleTable
from lightning_videoscale.data.planning.windows import Window


@dataclass(frozen=True)
class EpochPlan:
    """One epoch or one window of it, or what was left of either.

    Attributes:
        table: The samples.
        stream: (draws,) row of the table of every draw of the whole epoch, or of the window and what it carries.
        members: (planned,) draws, micro-batch by micro-batch.
        starts: (M + 1,) where each micro-batch begins in ``members``.
        shape_id: (M,) shape of each.
        cost: (M,) predicted cost of each.
        filler: (M,) whether a micro-batch only fills a slot that would stay empty.
        grid: (steps, ranks, micro_batches) numbers of micro-batches.
        weight: (steps, ranks, micro_batches) loss weights.
        cost_version: Names the step-time model that predicted the costs; empty where there was none.
        window: Which part of the epoch this is; None: all of it.
        left_over: Draws that make no whole step here, and are carried into the next window.
        later_steps: Optimizer steps that the epoch has behind this window, estimated: at least one, if it is not the
            last.
    """

    table: SampleTable
    stream: NDArray[np.int64]
    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    shape_id: NDArray[np.int64]
    cost: NDArray[np.float64]
    filler: NDArray[np.bool_]
    grid: NDArray[np.int64]
    weight: NDArray[np.float64]
    cost_version: str = ""
    window: Window | None = None
    left_over: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    later_steps: int = 0

    @property
    def ends_epoch(self) -> bool:
        """Whether nothing of the epoch comes behind this."""
        return self.window is None or self.window.is_last

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.grid)

    def micro_batches_of(self, dp_rank: int, first: int = 0) -> Iterator[MicroBatch]:
        """What one data-parallel rank trains on, in order. Equally many for every rank.

        Args:
            dp_rank: The rank.
            first: Micro-batches to leave out at the beginning.
        """
        places = zip(self.grid[:, dp_rank].flat[first:], self.weight[:, dp_rank].flat[first:], strict=True)
        return (self._micro_batch(int(number), float(weight)) for number, weight in places)

    @cached_property
    def micro_batches_per_shape(self) -> float:
        """How many micro-batches of one shape and batch size a rank trains on, on average over these and the ranks.

        Of a plan that is not empty.
        """
        kinds = np.stack([self.shape_id, np.diff(self.starts)], 1)[self.grid]
        of_ranks = np.moveaxis(kinds, 1, 0).reshape(self.grid.shape[1], -1, 2)
        return self.grid.size / sum(len(np.unique(of_rank, axis=0)) for of_rank in of_ranks)

    def done_after(self, steps: int) -> NDArray[np.bool_]:
        """(draws,) which draws are done when this plan's first steps are: in them, or no longer to be planned."""
        done = np.ones(len(self.stream), bool)
        ahead = np.setdiff1d(self.grid[steps:], np.flatnonzero(self.filler))
        sizes = np.diff(self.starts)
        taken = np.zeros(len(sizes), bool)
        taken[ahead] = True
        done[self.members[np.repeat(taken, sizes)]] = False
        done[self.left_over] = False
        return done

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan, the same on all ranks or something is wrong."""
        columns = (self.stream, self.members, self.starts, self.shape_id, self.grid, self.weight)
        content = hashlib.sha256(repr((self.table.shapes, self.table.sequence_lengths.tolist())).encode())
        for column in columns:
            # The shape as well: the same numbers are 200 steps of one micro-batch or 100 of two.
            content.update(repr((column.dtype.str, column.shape)).encode() + np.ascontiguousarray(column).tobytes())
        if self.table.rows is not None:
            content.update(self.table.rows.tobytes())
        return content.hexdigest()

    def _micro_batch(self, number: int, weight: float) -> MicroBatch:
        rows = self.stream[self.members[self.starts[number] : self.starts[number + 1]]]
        shape_id = int(self.shape_id[number])
        frames, height, width, _ = self.table.shapes[shape_id]
        length = int(self.table.sequence_lengths[shape_id])
        meta = BatchMeta(frames, height, width, length, len(rows), float(self.cost[number]), weight, self.cost_version)
        numbers = self.table.numbers(rows)
        return MicroBatch(tuple(numbers.tolist()), meta, tuple(self.table.start[rows].tolist()))
