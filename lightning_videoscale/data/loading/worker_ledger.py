"""What the workers of a loader did: how long they read, decoded and waited, and which samples they left out.

A worker is a process of its own, and a DataLoader brings nothing back from it but batches. So the figures are in shared
memory: every worker adds to a row of its own, and the process that trains reads all of them whenever it likes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info

from lightning_videoscale.data.shards.errors import MemberError, ShardError, UnreachableError

_MOST_WORKERS = 256
"""Rows; workers beyond share the last."""

REASONS = {
    1: "the sample cannot be decoded, or is no longer what was indexed",
    2: "its shard cannot be read, or is no longer what was indexed",
    3: "its shard could not be reached",
}
"""Why a sample was left out, by number; the warning of the rank that read it says it in full."""


class WorkerFigures(NamedTuple):
    """What one worker did so far; seconds are its own, whatever the others do meanwhile.

    Attributes:
        samples: Samples that it read and decoded, but for stand-ins.
        left_out: Samples that it had to leave out, each time that the plan asked for them.
        reading: Seconds that it waited for storage.
        decoding: Seconds from bytes to tensors, and to put them together.
        waiting: Seconds between two parts of micro-batches: for the training, which has enough in stock.
    """

    samples: float
    left_out: float
    reading: float
    decoding: float
    waiting: float


class LeftOut(NamedTuple):
    """Something that was left out: a sample by its number in the index, or else a shard by its own.

    Attributes:
        sample: Number of the sample; None where it is a whole shard.
        shard: Number of the shard; None where it is a sample.
        reason: One of `REASONS`.
    """

    sample: int | None
    shard: int | None
    reason: int


class WorkerLedger:
    """Figures and left-out samples of all workers of one reader, the main process among them."""

    def __init__(self, samples: int, shards: int) -> None:
        self._samples = samples
        # In shared memory: row 0 is that of the process that trains, row 1 + n of worker n.
        self._rows = torch.zeros(1 + _MOST_WORKERS, len(WorkerFigures._fields), dtype=torch.float64).share_memory_()
        # Of every sample and of every shard the reason for which it was left out first, in this epoch or before; 0: it
        # never was.
        self._reasons = torch.zeros(samples + shards, dtype=torch.uint8).share_memory_()
        self._idle_since = (0, 0.0)  # and the process that it is true of: a fork inherits it

    def note(self, number: int, shard: int, error: ShardError) -> bool:
        """Notes that a sample is left out; returns whether that is news, of the sample or of its shard as a whole."""
        self._add("left_out", 1)
        is_member = isinstance(error, MemberError)
        subject = number if is_member else self._samples + shard
        is_new = not self._reasons[subject]
        if is_new:
            self._reasons[subject] = 1 if is_member else 3 if isinstance(error, UnreachableError) else 2
        return is_new

    @contextmanager
    def part(self) -> Iterator[None]:
        """Counts the time since the last part of a micro-batch ended as waiting, and knows when this one ends."""
        process, since = self._idle_since
        if process == os.getpid():
            self._add("waiting", time.perf_counter() - since)
        try:
            yield
        finally:
            self._idle_since = os.getpid(), time.perf_counter()

    def add(self, samples: int, reading: float, seconds: float) -> None:
        """Adds what a part took, of which ``reading`` seconds were waiting for storage."""
        self._add("samples", samples)
        self._add("reading", reading)
        self._add("decoding", seconds - reading)

    def figures(self, workers: int) -> list[WorkerFigures]:
        """Returns those of the first workers, or of this process where there are none."""
        rows = self._rows[1 : 1 + workers] if workers else self._rows[:1]
        return [WorkerFigures(*row) for row in rows.tolist()]

    def left_out(self) -> list[LeftOut]:
        """Returns what was left out so far, samples before shards; a shard stands for all samples that are in it."""
        found = self._reasons.nonzero()[:, 0].tolist()
        return [
            LeftOut(n, None, int(self._reasons[n])) if n < self._samples
            else LeftOut(None, n - self._samples, int(self._reasons[n]))
            for n in found
        ]  # fmt: skip

    @property
    def _row(self) -> torch.Tensor:
        worker = get_worker_info()
        row: torch.Tensor = self._rows[0 if worker is None else min(1 + worker.id, _MOST_WORKERS)]
        return row

    def _add(self, name: str, amount: float) -> None:
        self._row[WorkerFigures._fields.index(name)] += amount
