"""Reads samples and planned micro-batches from the shards."""

from __future__ import annotations

import threading
import time
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_videoscale.data.loading.batch import Batch, batch_name, collate
from lightning_videoscale.data.planning import MicroBatch
from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards.captions import find_caption
from lightning_videoscale.data.shards.decoding import decode
from lightning_videoscale.data.shards.errors import MemberError, ShardError, UnreachableError
from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.frames import decode_clip
from lightning_videoscale.data.shards.index import ShardEntry, ShardIndex
from lightning_videoscale.data.shards.location import ShardStat, is_remote
from lightning_videoscale.data.shards.samples import Sample
from lightning_videoscale.data.shards.storage import Shard, open_member, open_shard

_MAX_OPEN = 32
_STAND_INS = 64
_REMOTE_TRUST = 60.0
"""Seconds until the version of a shard behind a URL is asked for again."""


class Cut(NamedTuple):
    """What the plan wants of a video or an image.

    Attributes:
        shape: Frames, height and width of the pixels.
        start: Seconds from the first frame.
        fps: Frames per second; the clip's own rate is used where it has fewer.
    """

    shape: ClipShape
    start: float = 0.0
    fps: float = 16.0


class OpenShards:
    """A bounded set of open shards, for any number of threads.

    Byte ranges mean nothing in a shard that was written again. Files are looked at before every use; objects behind a
    URL, of which asking is a request, when they are opened and once a minute. Pickling leaves the open files behind.
    """

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: OrderedDict[str, tuple[Shard, float]] = OrderedDict()  # with the time until which it is trusted
        self._lock = threading.Lock()

    def __getitem__(self, entry: ShardEntry) -> Shard:
        """The shard that is described by an entry of the index.

        Raises:
            ShardError: If it cannot be opened or is no longer what was indexed.
        """
        with self._lock:
            shard, trusted_until = self._open.pop(entry.url, (None, 0.0))
        now = time.monotonic()
        if shard is None or now >= trusted_until:
            shard = shard or open_shard(entry.url)
            _check_version(entry, shard.stat())
            trusted_until = now + (_REMOTE_TRUST if is_remote(entry.url) else 0.0)
        with self._lock:
            self._open[entry.url] = shard, trusted_until
            if len(self._open) > self._max_open:
                # A thread that still reads from it holds it open until it is done.
                self._open.popitem(last=False)
        return shard

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self._max_open,)


class SampleReader:
    """Reads and decodes samples of an index.

    Args:
        index: Says where they lie.
    """

    def __init__(self, index: ShardIndex) -> None:
        self.index = index
        self._shards = OpenShards()

    def read(self, number: int, cut: Cut | None = None) -> dict[str, Any]:
        """Reads a sample.

        Args:
            number: Its number in the index.
            cut: What is wanted of it, if it is a video or an image. Latents are always whole.

        Returns:
            Its members by their names in a batch: ``latents`` (C, F, H, W) or ``video`` (3, F, H, W) uint8, and all
            that pass through.

        Raises:
            MemberError: Naming shard and member, if it cannot be decoded, or is not what was indexed.
            ShardError: If the shard cannot be read.
        """
        entry, sample = self.index.shard_of(number), self.index.samples[number]
        main = next(iter(sample.members))
        content = self._content(number, with_main=sample.media == Media.LATENTS)
        read = {
            "latents" if e == main else batch_name(e): _decode(entry, f"{sample.key}.{e}", e, data)
            for e, data in content.items()
        }
        caption = find_caption(read.get("caption", ""), read.get("json"), entry.caption_key).text
        if caption or "text_embeds" not in read:
            read["caption"] = caption
        if sample.media == Media.LATENTS:
            _check_latents(entry, sample, read["latents"])
            return read
        if cut is None:
            raise ValueError(f"{entry.url}: {sample.key!r} is no latents: reading it needs a Cut.")
        return {"video": self.pixels(number, cut), **read}

    def pixels(self, number: int, cut: Cut) -> torch.Tensor:
        """Decodes a video or an image: (3, F, H, W), uint8.

        Raises:
            MemberError: If it does not decode.
            ShardError: If the shard cannot be read.
        """
        entry, sample = self.index.shard_of(number), self.index.samples[number]
        extension, at = next(iter(sample.members.items()))
        frames, height, width, _ = cut.shape
        fps = min(cut.fps, sample.fps) if sample.media == Media.VIDEO else 0.0
        try:
            with open_member(self._shards[entry], at) as file:
                return decode_clip(file, frames, height, width, cut.start, fps, sample.seeks)
        except MediaError as error:
            raise MemberError(f"{entry.url}: the member '{sample.key}.{extension}' cannot be used: {error}.") from error

    def beside(self, number: int) -> dict[str, bytes]:
        """The members beside the main one, as they are in the shard.

        Raises:
            ShardError: If the shard cannot be read.
        """
        return self._content(number, with_main=False)

    def _content(self, number: int, with_main: bool) -> dict[str, bytes]:
        members = self.index.samples[number].members
        wanted = list(members)[0 if with_main else 1 :]
        shard = self._shards[self.index.shard_of(number)]
        return dict(zip(wanted, shard.read_all([members[extension] for extension in wanted]), strict=True))


class MicroBatchReader(Dataset[Batch]):
    """A map-style dataset whose keys are planned micro-batches and whose values are batches.

    A sample that cannot be read costs its own weight and nothing else: it is left out of its batch, whose loss weight
    shrinks by its share. Where nothing of a batch is left, another sample of the same shape takes its place with weight
    0. Each sample, or each shard as a whole, is warned of once per rank, whichever worker reads it.

    Args:
        index: Says where the samples lie.
        fps: Frames per second of videos.
    """

    def __init__(self, index: ShardIndex, fps: float = 16.0) -> None:
        self._index = index
        self._fps = fps
        self._samples = SampleReader(index)
        # In shared memory, so that workers know what another has said, in this epoch or before.
        self._warned = torch.zeros(len(index) + len(index.shards), dtype=torch.bool).share_memory_()

    def __getitem__(self, micro_batch: MicroBatch) -> Batch:
        """Reads and decodes the samples of one micro-batch.

        Raises:
            ShardError: If none of its samples can be read, nor any of many others of its shape.
        """
        meta = micro_batch.meta
        shape = ClipShape(meta.frames, meta.height, meta.width)
        starts = micro_batch.starts or (0.0,) * len(micro_batch.samples)
        # No mapping: a dataset that is walked through more than once may have a sample twice in a micro-batch.
        found: list[tuple[int, dict[str, Any]]] = []
        problem: ShardError | None = None
        for number, start in zip(micro_batch.samples, starts, strict=True):
            try:
                found.append((number, self._samples.read(number, Cut(shape, start, self._fps))))
            except ShardError as error:
                problem = error
                self._warn_once(number, error)
        weight = meta.loss_weight * len(found) / len(micro_batch.samples)
        if problem is not None and not found:
            found = [self._stand_in(micro_batch.samples[0], shape, problem)]
        meta = meta._replace(samples=len(found), loss_weight=weight)
        return collate([sample for _, sample in found], [self._index.sample_id(number) for number, _ in found], meta)

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
        is_member = isinstance(error, MemberError)
        subject = number if is_member else len(self._index) + int(self._index.shard_numbers[number])
        if not self._warned[subject]:
            self._warned[subject] = True
            left_out = "The sample is" if is_member else "Its samples are"
            until = " until they can be read again" if isinstance(error, UnreachableError) else ""
            warnings.warn(f"{error} {left_out} left out{until}, with weight 0.", stacklevel=2)


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


def _check_version(entry: ShardEntry, stat: ShardStat) -> None:
    if stat.size != entry.size:
        difference = f"has {stat.size} bytes and had {entry.size} when it was indexed"
    elif stat.stamp != entry.stamp:
        difference = f"was written again after it was indexed (version {stat.stamp}, indexed was {entry.stamp})"
    else:
        return
    raise ShardError(f"The shard {entry.url} {difference}; start again, and it is indexed anew.")


def _decode(entry: ShardEntry, member: str, extension: str, data: bytes) -> Any:
    try:
        return decode(extension, data)
    except (ValueError, TypeError, RecursionError) as error:
        raise MemberError(f"{entry.url}: the member {member!r} cannot be decoded: {error}.") from error


def _check_latents(entry: ShardEntry, sample: Sample, latents: Any) -> None:
    if tuple(latents.shape) != sample.shape:
        raise MemberError(
            f"{entry.url}: the latents of {sample.key!r} have the shape {tuple(latents.shape)} and had {sample.shape} "
            "when they were indexed; start again, and they are indexed anew."
        )
