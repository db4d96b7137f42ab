"""The table of all samples: what each is, its true shape, and where its members lie.

Planning needs every shape before the first sample is read, so the shards are looked at once and the table is kept: a
JSON document per line, the first one naming the version, then one per shard. A shard that has changed since (size,
modification time or ETag) is looked at again. Whoever builds the table appends line by line, so that a build that was
stopped goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lightning_videoscale.data.planning.shapes import Media
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.keys import batch_name
from lightning_videoscale.data.shards.location import identity, is_remote, short_names
from lightning_videoscale.data.shards.samples import Samples
from lightning_videoscale.data.shards.tars import Refusal

_VERSION = 3
CACHE = Path("~/.cache/lightning-videoscale")
"""Where the index of remote shards is kept."""


@dataclass(frozen=True, eq=False)
class ShardEntry:
    """One shard as it was when it was looked at.

    Attributes:
        url: A local path or a URL.
        size: Bytes of the whole tar.
        stamp: Mark of its version.
        samples: What can be used of it, in the order of the tar.
        refused: Members that cannot be used, and why.
        ignored: Extensions that it also holds and that are not read, sorted.
        unread: Members that could not be read when it was looked at, and why; an empty name stands for the shard. They
            are looked at the next time, and what is in them is not known.
        caption_key: Field of ``.json`` that captions were to be taken from. None: ``.txt``, or else the usual fields.
        caption_fields: Fields that captions were found in, sorted.
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

    def to_json(self, folder: Path) -> dict[str, Any]:
        """The entry as it stands in a file in ``folder``: local paths are relative to it, so that both can move."""
        is_url = is_remote(self.url)
        place = {"url": self.url} if is_url else {"path": os.path.relpath(identity(self.url), folder.resolve())}
        version = {"size": self.size, "stamp": self.stamp}
        left_out = {"refused": self.refused, "ignored": self.ignored, "unread": self.unread}
        captions = {"caption_key": self.caption_key, "caption_fields": self.caption_fields}
        return {**place, **version, "samples": self.samples.to_json(), **left_out, **captions}

    @classmethod
    def from_json(cls, row: dict[str, Any], folder: Path) -> ShardEntry:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        url = row["url"] if "url" in row else os.path.normpath(folder / row["path"])
        refused, unread = (tuple(Refusal(*refusal) for refusal in row[name]) for name in ("refused", "unread"))
        return cls(
            url, row["size"], row["stamp"], Samples.from_json(row["samples"]), refused, tuple(row["ignored"]), unread,
            row["caption_key"], tuple(row["caption_fields"]),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """All samples of some shards, in a fixed order: sample i is ``samples[i]`` in the shard ``shard_of(i)``."""

    shards: tuple[ShardEntry, ...]

    @classmethod
    def load(cls, file: Path) -> ShardIndex:
        """Reads what `save` wrote.

        Raises:
            ShardError: If the file is no index, or one of another version.
        """
        with file.open(encoding="utf-8") as lines:
            try:
                version = json.loads(lines.readline())["version"]
                if version != _VERSION:
                    raise ValueError(f"it has version {version}, this release reads {_VERSION}")
                # The last line of a build that was killed may be cut off.
                whole = (line for line in lines if line.endswith("\n"))
                return cls(tuple(ShardEntry.from_json(json.loads(line), file.parent) for line in whole))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ShardError(
                    f"{file} is not a shard index ({error}): name another file, or delete it if it was one, and it is "
                    "built again."
                ) from error

    def save(self, file: Path) -> None:
        """Writes the index."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several nodes may write the same content to a shared folder: each replaces the file in one move.
        draft = file.with_name(f"{file.name}.{os.uname().nodename}.{os.getpid()}")
        with draft.open("w", encoding="utf-8") as lines:
            lines.write(header_line())
            lines.writelines(shard_line(shard, file.parent) for shard in self.shards)
        draft.replace(file)

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def samples(self) -> Samples:
        """All samples."""
        return Samples.concatenate([shard.samples for shard in self.shards])

    @cached_property
    def refused(self) -> tuple[tuple[str, Refusal], ...]:
        """What cannot be used, with the name of its shard."""
        return tuple((name, each) for name, shard in self._named for each in shard.refused)

    @cached_property
    def unread(self) -> tuple[tuple[str, Refusal], ...]:
        """What could not be read so far, with the name of its shard."""
        return tuple((name, each) for name, shard in self._named for each in shard.unread)

    @cached_property
    def without_caption(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(N,) bool, which samples have neither a caption nor ``text_embeds``."""
        samples, embeds = self.samples, [e for e in self.samples.extensions if batch_name(e) == "text_embeds"]
        row_of_member = np.repeat(np.arange(len(samples)), np.diff(samples.first_member))
        is_embeds = np.isin(samples.extension, [samples.extensions.index(extension) for extension in embeds])
        without: np.ndarray[Any, np.dtype[np.bool_]] = samples.clips.caption_length == 0
        without[row_of_member[is_embeds]] = False
        return without

    @cached_property
    def shard_numbers(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(N,) int32, the number of each sample's shard."""
        return np.repeat(np.arange(len(self.shards), dtype=np.int32), [len(shard.samples) for shard in self.shards])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return short_names([shard.url for shard in self.shards])

    @property
    def _named(self) -> Iterator[tuple[str, ShardEntry]]:
        return zip(self._names, self.shards, strict=True)

    def shard_of(self, sample: int) -> ShardEntry:
        """The shard that holds sample number ``sample``."""
        return self.shards[int(self.shard_numbers[sample])]

    def sample_id(self, sample: int) -> str:
        """Identity of a sample: its shard's path below the folder that all shards share, and its key."""
        return f"{self._names[self.shard_numbers[sample]]}/{self.samples.keys[sample]}"

    def check(self) -> None:
        """Looks whether this can be trained on.

        Raises:
            ShardError: If something could not be read so far, nothing in the shards can be used, or the latents differ
                in their channels.
        """
        if self.unread:
            shard, (member, reason) = self.unread[0]
            raise ShardError(
                f"The index is not complete: {len(self.unread)} samples or shards could not be read just now (the "
                f"first: {f'{shard}: {member!r}' if member else shard}: {reason}). Start again, or run `videoscale "
                "index` until it has seen all of them; what was read is kept."
            )
        urls = [shard.url for shard in self.shards]
        if not len(self) and not self.refused:
            raise ShardError(f"No samples found: the shards {urls} hold no members.")
        if not len(self):
            shard, (member, reason) = self.refused[0]
            raise ShardError(
                f"No samples found: nothing in the shards {urls} can be used ({len(self.refused)} refused). The first: "
                f"{f'{shard}: the member {member!r}' if member else shard}: {reason}."
            )
        latents = np.flatnonzero(self.samples.clips.media == Media.LATENTS)
        channels, first = np.unique(self.samples.channels[latents], return_index=True)
        if len(channels) > 1:
            found = (f"{c} in {self.sample_id(int(latents[i]))}" for c, i in zip(channels, first, strict=True))
            raise ShardError(
                f"The latents have different numbers of channels: {', '.join(found)}. One model takes one number."
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides what a plan reads: shards by name, keys, shapes, byte ranges.

        Folders and modification times are not part of it, so copies of the same shards agree.
        """
        digest = hashlib.sha256()
        for name, shard in self._named:
            digest.update(repr((name, len(shard.samples))).encode())
            shard.samples.update(digest)
        return digest.hexdigest()


def header_line() -> str:
    """The first line of an index file."""
    return json.dumps({"version": _VERSION}) + "\n"


def shard_line(shard: ShardEntry, folder: Path) -> str:
    """The line of one shard in an index file that lies in ``folder``."""
    return json.dumps(shard.to_json(folder), separators=(",", ":")) + "\n"


def default_index_file(shards: Sequence[str]) -> Path:
    """Where the index of these shards is kept by default, under a name made from all of them.

    Beside the first shard; in the user's cache folder if that is remote.
    """
    if is_remote(shards[0]):
        folder, names = CACHE.expanduser(), [identity(shard) for shard in shards]
    else:
        folder = Path(shards[0]).resolve().parent
        names = [s if is_remote(s) else os.path.relpath(identity(s), folder) for s in shards]
    return folder / f"videoscale-index-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]}.jsonl"
