"""Reads and decodes single samples of an index."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards.captions import find_caption
from lightning_videoscale.data.shards.decoding import decode
from lightning_videoscale.data.shards.errors import MemberError, ShardError
from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.frames import decode_clip
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.keys import batch_name
from lightning_videoscale.data.shards.location import ShardStat, is_remote
from lightning_videoscale.data.shards.samples import Sample
from lightning_videoscale.data.shards.shard_entry import ShardEntry
from lightning_videoscale.data.shards.storage import ReadingTime, Shard, TimedShard, open_member, open_shard

_MAX_OPEN = 32
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

    Attributes:
        time: What opening and reading them has taken.
    """

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self.time = ReadingTime()
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
            shard = shard or TimedShard(self.time.of(lambda: open_shard(entry.url)), self.time)
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
    """Reads and decodes samples of an index."""

    def __init__(self, index: ShardIndex) -> None:
        self.index = index
        self._shards = OpenShards()

    @property
    def reading_seconds(self) -> float:
        """Seconds that this thread has waited for storage so far."""
        return self._shards.time.seconds

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
        for name in {"latents", "text_embeds"} & read.keys():
            _check_finite(entry, f"{name} of {sample.key!r}", read[name])
        if "text_embeds" in read and "text_mask" in read:
            read["text_embeds"] = _filled_up(read["text_embeds"], read["text_mask"])
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

    def members(self, number: int) -> dict[str, bytes]:
        """All members, as they are in the shard; raises as `beside` does."""
        return self._content(number, with_main=True)

    def caption(self, number: int, beside: Mapping[str, bytes]) -> str:
        """The caption of a sample, by its members beside the main one.

        Raises:
            MemberError: If they cannot be decoded.
        """
        entry, key = self.index.shard_of(number), self.index.samples[number].key
        read = {e: _decode(entry, f"{key}.{e}", e, beside[e]) for e in ("txt", "json") if e in beside}
        return find_caption(read.get("txt", ""), read.get("json"), entry.caption_key).text

    def _content(self, number: int, with_main: bool) -> dict[str, bytes]:
        members = self.index.samples[number].members
        wanted = list(members)[0 if with_main else 1 :]
        shard = self._shards[self.index.shard_of(number)]
        return dict(zip(wanted, shard.read_all([members[extension] for extension in wanted]), strict=True))


def _filled_up(embeds: Any, mask: Any) -> Any:
    """Embeddings (n, D) with zeros behind them up to the length of their mask (L,), as `videoscale encode` means it."""
    are_tensors = isinstance(embeds, torch.Tensor) and isinstance(mask, torch.Tensor)
    if are_tensors and (embeds.ndim, mask.ndim) == (2, 1) and len(embeds) < len(mask):
        return torch.nn.functional.pad(embeds, (0, 0, 0, len(mask) - len(embeds)))
    return embeds


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


def _check_finite(entry: ShardEntry, what: str, values: Any) -> None:
    """One NaN that is trained on makes NaN of all weights. The sum tells, in a tenth of the time of `isfinite`."""
    if isinstance(values, torch.Tensor) and not values.float().sum().isfinite():
        raise MemberError(f"{entry.url}: the {what} hold NaN or infinity, or numbers near it; make them anew.")


def _check_latents(entry: ShardEntry, sample: Sample, latents: Any) -> None:
    if tuple(latents.shape) != sample.shape:
        raise MemberError(
            f"{entry.url}: the latents of {sample.key!r} have the shape {tuple(latents.shape)} and had {sample.shape} "
            "when they were indexed; start again, and they are indexed anew."
        )
