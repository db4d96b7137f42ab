"""One shard as it was when it was looked at, and the line of JSON that says so.

Lines are how a build that is under way notes each shard, and how releases before 0.2 kept the whole index.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_videoscale.data.planning.shapes import Media
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.keys import batch_name
from lightning_videoscale.data.shards.location import file_name, identity, is_remote
from lightning_videoscale.data.shards.samples import Samples
from lightning_videoscale.data.shards.tars import Refusal

_VERSION = 3


class Facts(NamedTuple):
    """What is asked of all samples of a shard together, so that it is kept and nobody looks at each again.

    Attributes:
        name: The shard's name without folders.
        contents: SHA-256 of that name and of everything that decides what a plan reads: keys, shapes, byte ranges.
        without_caption: Samples that have neither a caption nor ``text_embeds``.
        first_without_caption: The first of them.
        latent_channels: Different numbers of channels of latents, each with the first sample that has it.
    """

    name: str
    contents: str
    without_caption: int
    first_without_caption: int
    latent_channels: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, name: str, samples: Samples) -> Facts:
        """Looks at every sample of a shard of this name."""
        digest = hashlib.sha256()
        update_contents(digest, name, samples)
        clips = samples.clips
        embeds = {extension for extension in samples.extensions if batch_name(extension) == "text_embeds"}
        without = np.flatnonzero((clips.caption_length == 0) & ~samples.with_member(embeds))
        latents = np.flatnonzero(clips.media == Media.LATENTS)
        channels, first = np.unique(samples.channels[latents], return_index=True)
        latent_channels = tuple(zip(channels.tolist(), latents[first].tolist(), strict=True))
        return cls(name, digest.hexdigest(), len(without), int(without[0]) if len(without) else -1, latent_channels)

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Facts:
        """Reads the list that JSON makes of it."""
        name, contents, without, first, channels = values
        return cls(name, contents, without, first, tuple((number, sample) for number, sample in channels))


def update_contents(digest: hashlib._Hash, name: str, samples: Samples) -> None:
    """Adds what a shard of this name holds to a hash."""
    digest.update(repr((name, len(samples))).encode())
    samples.update(digest)


class Stored(NamedTuple):
    """Where a shard stands in an index on disk: in which part, and as which of its shards."""

    part: Path
    number: int


@dataclass(frozen=True, eq=False)
class ShardEntry:
    """One shard as it was when it was looked at.

    Attributes:
        url: A local path or a URL.
        size: Bytes of the whole tar.
        stamp: Mark of its version.
        samples: What can be used of it, in the order of the tar.
        refused: Members that cannot be used, and why.
        ignored: Extensions that it also holds and that are not read, sorted; tensors as ``safetensors:text_embeds``.
        unread: Members that could not be read when it was looked at, and why; an empty name stands for the shard. They
            are looked at the next time, and what is in them is not known.
        caption_key: Field of ``.json`` that captions were to be taken from. None: ``.txt``, or else the usual fields.
        caption_fields: Fields that captions were found in, sorted.
        captions: SHA-256 of its samples' captions. None: an index of an older release did not say.
        kept: What is known of all its samples together from a table that was read; None: it is to be found.
        stored: Where that table has it; None: nowhere.
    """

    url: str
    size: int
    stamp: str
    samples: Samples
    refused: tuple[Refusal, ...] = ()
    ignored: tuple[str, ...] = ()
    unread: tuple[Refusal, ...] = ()
    caption_key: str | None = None
    caption_fields: tuple[str, ...] = ()
    captions: str | None = None
    kept: Facts | None = None
    stored: Stored | None = None

    @cached_property
    def facts(self) -> Facts:
        """What is known of all its samples together."""
        name = file_name(self.url)
        return self.kept if self.kept is not None and self.kept.name == name else Facts.of(name, self.samples)

    def to_json(self, folder: Path) -> dict[str, Any]:
        """All but the samples, for a file in ``folder``: local paths are relative to it, so that both can move."""
        is_url = is_remote(self.url)
        place = {"url": self.url} if is_url else {"path": os.path.relpath(identity(self.url), folder.resolve())}
        version = {"size": self.size, "stamp": self.stamp}
        left_out = {"refused": self.refused, "ignored": self.ignored, "unread": self.unread}
        captions = {
            "caption_key": self.caption_key, "caption_fields": self.caption_fields, "captions": self.captions
        }  # fmt: skip
        return {**place, **version, **left_out, **captions}

    @classmethod
    def from_json(
        cls,
        row: dict[str, Any],
        folder: Path,
        samples: Samples,
        kept: Facts | None = None,
        stored: Stored | None = None,
    ) -> ShardEntry:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        url = row["url"] if "url" in row else os.path.normpath(folder / row["path"])
        refused, unread = (tuple(Refusal(*refusal) for refusal in row[name]) for name in ("refused", "unread"))
        return cls(
            url, row["size"], row["stamp"], samples, refused, tuple(row["ignored"]), unread, row["caption_key"],
            tuple(row["caption_fields"]), row.get("captions"), kept, stored,
        )  # fmt: skip


def header_line() -> str:
    """The first line of a file of lines."""
    return json.dumps({"version": _VERSION}) + "\n"


def shard_line(shard: ShardEntry, folder: Path) -> str:
    """The line of one shard, with its samples, in a file that lies in ``folder``."""
    row = {**shard.to_json(folder), "samples": shard.samples.to_json()}
    return json.dumps(row, separators=(",", ":")) + "\n"


def read_lines(file: Path) -> list[ShardEntry]:
    """Reads a file of lines; the last one of a build that was killed may be cut off, and is left out.

    Raises:
        OSError: If there is no such file.
        ShardError: If it is something else, or has another version.
    """
    with file.open(encoding="utf-8") as lines:
        try:
            version = json.loads(lines.readline())["version"]
            if version != _VERSION:
                raise ValueError(f"it has version {version}, this release reads {_VERSION}")
            rows = (json.loads(line) for line in lines if line.endswith("\n"))
            return [ShardEntry.from_json(row, file.parent, Samples.from_json(row["samples"])) for row in rows]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise no_index(file, error) from error


def no_index(file: Path, error: Exception) -> ShardError:
    """What is said of a file that should be an index and is none."""
    return ShardError(
        f"{file} is not a shard index ({error}): name another one, or delete it if it was one, and it is built again."
    )
