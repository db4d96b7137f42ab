"""Reads planned micro-batches from the shards."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_videoscale.data.loading.batch import batch_of, columns_of, joined
from lightning_videoscale.data.loading.parts import BatchPart, ReadPart
from lightning_videoscale.data.loading.worker_ledger import WorkerLedger
from lightning_videoscale.data.planning import MicroBatch
from lightning_videoscale.data.planning.micro_batch import Batch
from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards.errors import MemberError, ShardError, UnreachableError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader

_STAND_INS = 64


class MicroBatchReader(Dataset[Batch]):
    """A map-style dataset whose keys are planned micro-batches and whose values are batches.

    A sample that cannot be read costs its own weight and nothing else: it is left out of its batch, whose loss weight
    shrinks by its share. Where nothing of a batch is left, another sample of the same shape takes its place with weight
    0. Each sample, or each shard as a whole, is warned of once per rank, whichever worker reads it.

    Args:
        index: Says where the samples lie.
        fps: Frames per second of videos.

    Attributes:
        ledger: What all processes that read have done, and what they left out.
    """

    def __init__(self, index: ShardIndex, fps: float = 16.0) -> None:
        self._index = index
        self._fps = fps
        self._samples = SampleReader(index)
        self.ledger = WorkerLedger(len(index), len(index.shards))

    def __getitem__(self, micro_batch: MicroBatch) -> Batch:
        """Reads and decodes the samples of one micro-batch.

        Raises:
            ShardError: If none of its samples can be read, nor any of many others of its shape.
        """
        return self.together([self.read(BatchPart.whole(micro_batch))])

    def read(self, part: BatchPart) -> ReadPart:
        """Reads and decodes some samples of a micro-batch; what cannot be read is missing."""
        with self.ledger.part():
            begin, read_before = time.perf_counter(), self._samples.reading_seconds
            read = self._read(part)
            reading = self._samples.reading_seconds - read_before
            self.ledger.add(len(read.numbers), reading, time.perf_counter() - begin)
        return read

    def _read(self, part: BatchPart) -> ReadPart:
        micro_batch, which = part.micro_batch, slice(part.begin, part.end)
        starts = micro_batch.starts or (0.0,) * len(micro_batch.samples)
        # No mapping: a dataset that is walked through more than once may have a sample twice in a micro-batch.
        found: list[tuple[int, dict[str, Any]]] = []
        problem: ShardError | None = None
        for number, start in zip(micro_batch.samples[which], starts[which], strict=True):
            try:
                found.append((number, self._samples.read(number, Cut(_shape(micro_batch), start, self._fps))))
            except ShardError as error:
                problem = error
                self._warn_once(number, error)
        return ReadPart(part, [number for number, _ in found], columns_of([sample for _, sample in found]), problem)

    def together(self, parts: Sequence[ReadPart], pin: bool = False) -> Batch:
        """Makes a batch of all parts of a micro-batch, in order; with ``pin`` in page-locked memory.

        Raises:
            ShardError: If nothing of it could be read, nor any of many others of its shape.
        """
        micro_batch = parts[0].part.micro_batch
        numbers = [number for part in parts for number in part.numbers]
        columns = [part.columns for part in parts if part.numbers]
        weight = micro_batch.meta.loss_weight * len(numbers) / len(micro_batch.samples)
        if not numbers and (problem := parts[0].problem) is not None:
            number, sample = self._stand_in(micro_batch.samples[0], _shape(micro_batch), problem)
            numbers, columns = [number], [columns_of([sample])]
        meta = micro_batch.meta._replace(samples=len(numbers), loss_weight=weight)
        sample_ids = [self._index.sample_id(number) for number in numbers]
        return batch_of(joined(columns, pin), sample_ids, meta, pin)

    def is_slow(self, micro_batch: MicroBatch) -> bool:
        """Whether reading a sample of it takes long beside handing it over: pixels are decoded, latents are copied."""
        return bool(self._index.samples[micro_batch.samples[0]].media != Media.LATENTS)

    def _stand_in(self, number: int, shape: ClipShape, problem: ShardError) -> tuple[int, dict[str, Any]]:
        for other in _alike(self._index, number):
            try:
                return other, self._samples.read(other, Cut(shape, 0.0, self._fps))
            except ShardError as error:
                self._warn_once(other, error)
        raise ShardError(
            f"Neither the samples of a batch nor others of their shape can be read. {problem}"
        ) from problem

    def _warn_once(self, number: int, error: ShardError) -> None:
        if self.ledger.note(number, self._index.shard_number(number), error):
            left_out = "The sample is" if isinstance(error, MemberError) else "Its samples are"
            until = " until they can be read again" if isinstance(error, UnreachableError) else ""
            warnings.warn(f"{error} {left_out} left out{until}, with weight 0.", stacklevel=2)


def _shape(micro_batch: MicroBatch) -> ClipShape:
    return ClipShape(micro_batch.meta.frames, micro_batch.meta.height, micro_batch.meta.width)


def _alike(index: ShardIndex, number: int) -> list[int]:
    """Some samples spread over the index that may stand in for one: of its kind, and not smaller or shorter."""
    clips, channels = index.samples.clips, index.samples.channels
    alike = (clips.media == clips.media[number]) & (channels == channels[number])
    if clips.media[number] == Media.LATENTS:
        sizes = (clips.num_frames, clips.height, clips.width)
        alike &= np.logical_and.reduce([size == size[number] for size in sizes])
    else:
        alike &= clips.duration >= clips.duration[number]
    rows = np.flatnonzero(alike)
    return [int(row) for row in rows[:: max(1, len(rows) // _STAND_INS)] if row != number]
