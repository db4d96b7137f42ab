"""Batches to measure with: of the shape that is asked for, and with all that a training step may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data.loading.batch import collate
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.planning import MicroBatch, SampleTable
from lightning_videoscale.data.planning.micro_batch import Batch, BatchMeta


class RandomBatches:
    """Random latents or pixels, an empty caption, and further members of given sizes.

    Args:
        channels: Channels of the latents.
        members: Sizes of one sample of further members, such as ``{"text_embeds": (512, 4096)}``; random float32.
    """

    def __init__(self, channels: int = 16, members: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._channels = channels
        self._members = dict(members or {})

    def __call__(self, cell: Cell) -> Batch:
        """Returns the batch of a cell."""
        frames, height, width, is_latents = cell.shape
        generator = torch.Generator().manual_seed(cell.sequence_length)
        sample: dict[str, Any] = {"caption": ""}
        if is_latents:
            sample["latents"] = torch.randn(self._channels, frames, height, width, generator=generator)
        else:
            sample["video"] = torch.randint(256, (3, frames, height, width), generator=generator, dtype=torch.uint8)
        sample |= {name: torch.randn(size, generator=generator) for name, size in self._members.items()}
        return _repeat(sample, cell)


class RepresentativeBatches:
    """One sample of each shape, read from the shards and repeated: all members are what they are in training.

    Args:
        reader: Reads the shards of an index.
        table: The samples of that index.
        encode: Makes of a batch what the training step receives; None: it is that.
    """

    def __init__(
        self, reader: MicroBatchReader, table: SampleTable, encode: Callable[[Batch], Batch] | None = None
    ) -> None:
        self._reader = reader
        self._table = table
        self._encode = encode
        self._samples: dict[tuple[int, int, int, bool], dict[str, Any]] = {}

    def __call__(self, cell: Cell) -> Batch:
        """Returns the batch of a cell.

        Raises:
            ShardError: If no sample of the shape can be read.
        """
        if cell.shape not in self._samples:
            self._samples[cell.shape] = self._read(cell)
        batch = _repeat(self._samples[cell.shape], cell)
        return batch if self._encode is None else self._encode(batch)

    def _read(self, cell: Cell) -> dict[str, Any]:
        shape_id = self._table.shapes.index(cell.shape)
        rows = (self._table.shape_id == shape_id).argmax(keepdims=True)
        numbers, starts = self._table.numbers(rows).tolist(), self._table.start[rows].tolist()
        batch = self._reader[MicroBatch(tuple(numbers), _meta(cell, 1), tuple(starts))]
        return {name: value[0] for name, value in batch.items() if name not in ("sample_ids", "meta")}


def _repeat(sample: dict[str, Any], cell: Cell) -> Batch:
    ids = [f"synthetic/{number}" for number in range(cell.samples)]
    return collate([sample] * cell.samples, ids, _meta(cell, cell.samples))


def _meta(cell: Cell, samples: int) -> BatchMeta:
    frames, height, width, _ = cell.shape
    return BatchMeta(frames, height, width, cell.sequence_length, samples, predicted_cost=0.0, loss_weight=1.0)
