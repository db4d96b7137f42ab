"""Parts of micro-batches: what one worker reads at once, and hands to the process that trains.

Pixels take long to decode, so all workers decode some samples of each micro-batch. Latents take no longer to read than
to hand over, so one worker reads a micro-batch of them as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_videoscale.data.loading.batch import MemberColumns, pinned
from lightning_videoscale.data.planning import MicroBatch
from lightning_videoscale.data.shards.errors import ShardError


class BatchPart(NamedTuple):
    """Samples ``begin`` to ``end`` of a micro-batch."""

    micro_batch: MicroBatch
    begin: int
    end: int

    @classmethod
    def whole(cls, micro_batch: MicroBatch) -> BatchPart:
        """All samples of a micro-batch."""
        return cls(micro_batch, 0, len(micro_batch.samples))

    @property
    def is_whole(self) -> bool:
        """Whether there are no other parts."""
        return self.begin == 0 and self.is_last

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch ends with it."""
        return self.end == len(self.micro_batch.samples)


@dataclass(frozen=True)
class ReadPart:
    """What was read of a part.

    Attributes:
        part: Which one.
        numbers: Those of its samples that could be read, by their numbers in the index.
        columns: Their members.
        problem: Why one of the others could not be read; None where all could.
    """

    part: BatchPart
    numbers: list[int]
    columns: MemberColumns
    problem: ShardError | None = None

    def pin_memory(self) -> ReadPart:
        """Torch's thread that pins calls this. What is to be joined with other parts is pinned then, once."""
        return replace(self, columns=pinned(self.columns)) if self.part.is_whole else self


def in_parts(
    micro_batches: Iterable[MicroBatch], workers: int, is_shared: Callable[[MicroBatch], bool]
) -> Iterator[BatchPart]:
    """Divides micro-batches into parts, in order, for workers that take them in turn.

    Where samples do not divide evenly, another worker has one more of the next micro-batch: 2 workers read of two
    micro-batches of 3 samples 2 + 1 and 1 + 2.

    Args:
        micro_batches: In the order in which they are needed.
        workers: How many take turns.
        is_shared: Whether the samples of a micro-batch are worth the division.
    """
    turn = favoured = 0
    for micro_batch in micro_batches:
        samples = len(micro_batch.samples)
        count = max(1, min(workers, samples)) if is_shared(micro_batch) else 1
        each, left = divmod(samples, count)
        end = 0
        for worker in range(turn, turn + count):
            begin, end = end, end + each + ((worker - favoured) % count < left)
            yield BatchPart(micro_batch, begin, end)
        turn, favoured = turn + count, favoured + left
