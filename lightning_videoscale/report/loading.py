"""What the loaders did over a run, worker by worker, and what of the shards was never trained on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_videoscale.report.reading import RunRecords


class Worker(NamedTuple):
    """What one worker of one rank did in the run; seconds are its own.

    Attributes:
        rank: Global rank.
        worker: Its number; None: the rank has none, and the process that trains reads.
        samples: Samples read and decoded.
        left_out: Times that it left a sample out.
        reading: Seconds that it waited for storage.
        decoding: Seconds from bytes to tensors.
        waiting: Seconds that it waited for the training, with enough in stock.
    """

    rank: int
    worker: int | None
    samples: float
    left_out: float
    reading: float
    decoding: float
    waiting: float

    @property
    def working(self) -> float:
        """Seconds that it reads or decodes."""
        return self.reading + self.decoding

    @property
    def busy(self) -> float:
        """Share of its time that it works."""
        total = self.working + self.waiting
        return self.working / total if total else 0.0


class Loading(NamedTuple):
    """The workers of all ranks, and what they left out.

    Attributes:
        workers: By rank and number.
        left_out: Names of samples or shards, with the reason; the first of each.
    """

    workers: list[Worker]
    left_out: list[tuple[str, str]]

    @property
    def reading(self) -> float:
        """Share of reading in the time that the workers work."""
        working = sum(worker.working for worker in self.workers)
        return sum(worker.reading for worker in self.workers) / working if working else 0.0

    @property
    def busy(self) -> float:
        """Share of their time that the workers work; 1 where none are beside the processes that train."""
        working, waiting = (sum(getattr(worker, name) for worker in self.workers) for name in ("working", "waiting"))
        if any(worker.worker is None for worker in self.workers) or not working + waiting:
            return 1.0
        return float(working / (working + waiting))

    @property
    def times_left_out(self) -> int:
        """How often a sample was left out, in all epochs."""
        return int(sum(worker.left_out for worker in self.workers))


def loading_of(run: RunRecords) -> Loading | None:
    """Returns what the `loading` records of a run add up to; None where there is none.

    A run may go on with another number of workers or ranks: figures of one number are then added up.
    """
    records = run.of("loading")
    if not records:
        return None
    totals: dict[tuple[int, int | None], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for record in records:
        for rank, workers in enumerate(record["workers"]):
            for number, figures in enumerate(workers):
                key = rank, None if record["in_process"] else number
                totals[key] = totals.get(key, np.zeros(len(figures))) + np.array(figures, np.float64)
    workers = [Worker(*key, *map(float, figures)) for key, figures in sorted(totals.items(), key=_in_order)]
    named = dict(tuple(row) for record in records for row in record["left_out"])
    return Loading(workers, list(named.items()))


def _in_order(item: tuple[tuple[int, int | None], object]) -> tuple[int, int]:
    (rank, worker), _ = item
    return rank, -1 if worker is None else worker
