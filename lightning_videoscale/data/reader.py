"""Reads planned micro-batches from the shards."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lightning_videoscale.data.batch import Batch, batch_name, collate
from lightning_videoscale.data.decoding import decode
from lightning_videoscale.data.index import ShardEntry, ShardIndex
from lightning_videoscale.data.plan import MicroBatch
from lightning_videoscale.data.shards import ByteRange, ShardError

_MAX_OPEN = 32


class OpenShards:
    """A bounded set of open shards.

    Reads name their position (``pread``), so a process forked while shards are open shares no file position with its
    parent. Pickling leaves the open files behind.
    """

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self._max_open = max_open
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def read(self, shard: ShardEntry, at: ByteRange) -> bytes:
        """Reads a member's bytes.

        Raises:
            ShardError: If the shard cannot be opened or is no longer the size that was indexed.
        """
        try:
            data = os.pread(self._descriptor(shard), at.size, at.offset)
        except OSError as error:
            raise ShardError(f"The shard {shard.path} cannot be read any more: {error}.") from error
        if len(data) != at.size:
            raise ShardError(
                f"The shard {shard.path} ends before byte {at.offset + at.size}; it was cut after indexing."
            )
        return data

    def close(self) -> None:
        """Closes what is open."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, shard: ShardEntry) -> int:
        if shard.path in self._descriptors:
            self._descriptors.move_to_end(shard.path)
        else:
            descriptor = os.open(shard.path, os.O_RDONLY)
            self._descriptors[shard.path] = descriptor
            if len(self._descriptors) > self._max_open:
                os.close(self._descriptors.popitem(last=False)[1])
            if (size := os.fstat(descriptor).st_size) != shard.size:
                raise ShardError(
                    f"The shard {shard.path} has {size} bytes and had {shard.size} when it was indexed; "
                    "start again, and it is indexed anew."
                )
        return self._descriptors[shard.path]

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self._max_open,)


class MicroBatchReader(Dataset[Batch]):
    """A map-style dataset whose keys are planned micro-batches and whose values are batches."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._shards = OpenShards()

    def __getitem__(self, micro_batch: MicroBatch) -> Batch:
        """Reads and decodes the samples of one micro-batch.

        Raises:
            ShardError: Naming shard, sample and member, if one cannot be read or decoded.
        """
        samples = [self._read(sample) for sample in micro_batch.samples]
        return collate(samples, [self._index.sample_id(sample) for sample in micro_batch.samples], micro_batch.meta)

    def _read(self, sample: int) -> dict[str, Any]:
        shard, entry = self._index.shard_of(sample), self._index.samples[sample]
        return {batch_name(e): self._decode(shard, f"{entry.key}.{e}", e, at) for e, at in entry.members.items()}

    def _decode(self, shard: ShardEntry, member: str, extension: str, at: ByteRange) -> Any:
        data = self._shards.read(shard, at)
        try:
            return decode(extension, data)
        except (ValueError, TypeError, RecursionError) as error:
            raise ShardError(f"{shard.path}: the member {member!r} cannot be decoded: {error}.") from error
