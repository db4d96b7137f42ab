"""Which samples form a micro-batch.

All samples of a micro-batch have one shape, and it holds no more of them than the budget allows. Samples of a shape are
batched in the order of the stream. What remains when a bucket's samples are divided by its batch size is today's
problem: the last batch is small, and rare shapes wait long for company. Here a shape's samples are divided *evenly*
over as many micro-batches as the budget and the longest wait ask for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SHORTEST_WAIT = 120.0
_LITTLE = 0.005  # of the epoch, as throughputs that differ by less count as equal
_FEW_MORE = 0.1  # micro-batches, and so steps, whose optimizer and gradients of all ranks take time that no cost counts


class Batches(NamedTuple):
    """M micro-batches that have no place yet.

    Attributes:
        members: (samples,) positions in the stream, micro-batch by micro-batch.
        starts: (M + 1,) where each micro-batch begins in ``members``.
        shape_id: (M,) their shapes.
        position: (M,) when it is to be trained, from 0 to 1: where its first sample lies in the stream, so that none is
            late for the sake of the others; where ``max_wait`` is None, where it is full, or the end for what never is.
    """

    members: NDArray[np.int64]
    starts: NDArray[np.int64]
    shape_id: NDArray[np.int64]
    position: NDArray[np.float64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(M,) samples of each."""
        return np.diff(self.starts)


def cut(
    shape_id: NDArray[np.int64],
    batch_sizes: NDArray[np.int64],
    unit_costs: NDArray[np.float64],
    slots: int,
    max_wait: float | None,
    fill: bool = True,
) -> Batches:
    """Cuts a stream of samples into micro-batches, as many as a multiple of ``slots`` where the samples suffice.

    Args:
        shape_id: (samples,) shape of each sample of the stream; at least one.
        batch_sizes: (shapes,) samples of a micro-batch at most.
        unit_costs: (shapes,) cost of one sample.
        slots: Micro-batches of an optimizer step over all ranks.
        max_wait: Steps that the samples of a micro-batch are apart in the stream at most, about. None fills every batch
            however long it takes, and leaves what remains of a bucket to the end.
        fill: Whether slots of the last step that would stay empty are filled by dividing micro-batches further.
    """
    samples = np.bincount(shape_id, minlength=len(batch_sizes))
    full = -(-samples // batch_sizes)
    wanted = full if max_wait is None else _with_bounded_wait(samples, full, slots, max_wait)
    counts = _fill_slots(samples, wanted, unit_costs, slots) if fill else wanted

    shape = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(shape)) - (np.cumsum(counts) - counts)[shape]
    evenly = number * samples[shape] // counts[shape]
    # Shapes whose count was raised to fill slots are divided evenly in any case.
    greedy = np.logical_and(max_wait is None, counts == full)[shape]
    begin = np.where(greedy, number * batch_sizes[shape], evenly)

    members = np.argsort(shape_id, kind="stable")
    starts = np.r_[(np.cumsum(samples) - samples)[shape] + begin, len(members)]
    sizes = np.diff(starts)
    if max_wait is None:
        position = np.where(sizes < batch_sizes[shape], len(members), members[starts[1:] - 1])
    else:
        position = members[starts[:-1]]
    return Batches(members, starts, shape, position / len(members))


def whole_steps(batches: Batches, slots: int) -> tuple[Batches, NDArray[np.int64]]:
    """Leaves out the micro-batches that make no whole step: those that are to be trained last.

    Returns:
        The others; and what was in those that are left out, ascending positions in the stream.
    """
    total = len(batches.sizes)
    is_kept = np.ones(total, bool)
    is_kept[np.argsort(batches.position, kind="stable")[total - total % slots :]] = False
    kept = np.repeat(is_kept, batches.sizes)
    starts = np.r_[0, np.cumsum(batches.sizes[is_kept])]
    rest = Batches(batches.members[kept], starts, batches.shape_id[is_kept], batches.position[is_kept])
    return rest, np.sort(batches.members[~kept])


def affordable_wait(
    shape_id: NDArray[np.int64],
    batch_sizes: NDArray[np.int64],
    costs_of: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    slots: int,
) -> float:
    """The shortest ``max_wait`` of 120 steps, 240, 480 and so on whose micro-batches cost little more than full ones.

    Where steps have few slots, some of them hold few micro-batches of a shape: samples that are to find company in so
    few steps train in small micro-batches, each of which takes what any step takes. Costs may not know that: FLOPs are
    as many however they are divided. So there are few more micro-batches, too.

    Args:
        shape_id: (samples,) shape of each sample of the stream.
        batch_sizes: (shapes,) samples of a micro-batch at most.
        costs_of: Cost of a micro-batch of so many samples of each shape, (shapes,) of (shapes,).
        slots: Micro-batches of an optimizer step over all ranks.
    """
    samples = np.bincount(shape_id, minlength=len(batch_sizes))
    full = -(-samples // batch_sizes)

    def cost(counts: NDArray[np.int64]) -> float:
        size, larger = np.divmod(samples, np.maximum(counts, 1))
        return float(((counts - larger) * costs_of(size) + larger * costs_of(size + 1)).sum())

    enough, many = (1 + _LITTLE) * cost(full), (1 + _FEW_MORE) * full.sum()

    def is_enough(wait: float) -> bool:
        counts = _with_bounded_wait(samples, full, slots, wait)
        return bool(counts.sum() <= many and cost(counts) <= enough)

    wait = _SHORTEST_WAIT
    while not is_enough(wait):  # one as long as the epoch fills all
        wait *= 2
    return wait


def _with_bounded_wait(
    samples: NDArray[np.int64], full: NDArray[np.int64], slots: int, max_wait: float
) -> NDArray[np.int64]:
    """Micro-batches per shape such that the samples of one are not too many steps apart."""
    counts = full
    # More micro-batches make more steps, and these more micro-batches: a few rounds settle it.
    for _ in range(8):
        steps = counts.sum() / slots
        counts = np.maximum(full, np.minimum(samples, np.ceil(steps / max_wait).astype(np.int64)))
    return counts


def _fill_slots(
    samples: NDArray[np.int64], counts: NDArray[np.int64], unit_costs: NDArray[np.float64], slots: int
) -> NDArray[np.int64]:
    """Raises counts to a multiple of the slots, where micro-batches cost most and still hold two samples."""
    counts = counts.copy()
    heap = [(-unit_costs[s] * samples[s] / counts[s], s) for s in np.flatnonzero(samples > counts).tolist()]
    heapq.heapify(heap)
    missing = int(-counts.sum() % slots)
    while missing and heap:
        _, shape = heapq.heappop(heap)
        counts[shape] += 1
        missing -= 1
        if samples[shape] > counts[shape]:
            heapq.heappush(heap, (-unit_costs[shape] * samples[shape] / counts[shape], shape))
    return counts
