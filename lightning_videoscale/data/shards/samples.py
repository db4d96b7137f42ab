"""The columns that are known of every sample, and one row of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.shapes import Clips, Media
from lightning_videoscale.data.shards.film import Seek
from lightning_videoscale.data.shards.location import ByteRange, Members

LatentShape = tuple[int, int, int, int]
"""Channels, frames, height and width."""


class Sample(NamedTuple):
    """One sample.

    Attributes:
        key: Its name in the shard.
        media: What it is made of.
        channels: Channels of its latents; 3 for images and videos.
        num_frames: Frames as decoded, or latent frames.
        height: Rows of the upright picture, or of the latents.
        width: Columns likewise.
        fps: Frames per second on average; 0 for images and latents.
        duration: Seconds; 0 likewise.
        caption_length: Characters of its caption; 0 where there is none.
        members: Where the members lie that are read, by extension. The first is what ``media`` speaks of.
        seeks: Where decoding a video may begin beside its start, in order.
    """

    key: str
    media: Media
    channels: int
    num_frames: int
    height: int
    width: int
    fps: float
    duration: float
    caption_length: int
    members: Members
    seeks: tuple[Seek, ...] = ()

    @property
    def shape(self) -> LatentShape:
        """Channels, frames, height and width."""
        return self.channels, self.num_frames, self.height, self.width


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """A table of N samples with M members and S key frames to seek, by columns; a row is made when it is asked for.

    Attributes:
        keys: Name of each sample in its shard.
        channels: (N,) int32.
        clips: The columns that planning needs.
        extensions: The different extensions.
        first_member: (N + 1,) int64, the place of each sample's first member in the columns below.
        extension: (M,) int32, each member's number in ``extensions``.
        offset: (M,) int64, where it lies in its shard, in bytes.
        size: (M,) int64, its length in bytes.
        first_seek: (N + 1,) int64, the place of each sample's first key frame in the columns below.
        seek_stamp: (S,) int64, `Seek.stamp` of each.
        seek_begin: (S,) int64, `Seek.begin` of each.
    """

    keys: tuple[str, ...]
    channels: NDArray[np.int32]
    clips: Clips
    extensions: tuple[str, ...]
    first_member: NDArray[np.int64]
    extension: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    first_seek: NDArray[np.int64]
    seek_stamp: NDArray[np.int64]
    seek_begin: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sample]) -> Samples:
        """Makes the table of these rows."""

        def column(name: str) -> NDArray[Any]:
            return np.array([getattr(row, name) for row in rows], _DTYPES[name])

        extensions = tuple(dict.fromkeys(extension for row in rows for extension in row.members))
        number = {extension: i for i, extension in enumerate(extensions)}
        members = [(number[extension], *at) for row in rows for extension, at in row.members.items()]
        extension, offset, size = np.array(members, np.int64).reshape(-1, 3).T
        stamp, begin = np.array([seek for row in rows for seek in row.seeks], np.int64).reshape(-1, 2).T
        return cls(
            keys=tuple(row.key for row in rows),
            channels=column("channels"),
            clips=Clips(**{name: column(name) for name in _CLIP_COLUMNS}, source=np.zeros(len(rows), np.int32)),
            extensions=extensions,
            first_member=np.cumsum([0] + [len(row.members) for row in rows]),
            extension=extension.astype(np.int32),
            offset=offset,
            size=size,
            first_seek=np.cumsum([0] + [len(row.seeks) for row in rows]),
            seek_stamp=stamp,
            seek_begin=begin,
        )

    @classmethod
    def concatenate(cls, tables: Sequence[Samples]) -> Samples:
        """Puts tables one below the other."""
        if not tables:
            return cls.of([])
        extensions = tuple(dict.fromkeys(extension for table in tables for extension in table.extensions))
        number = {extension: i for i, extension in enumerate(extensions)}
        renumbered = [np.array([number[e] for e in t.extensions], np.int32)[t.extension] for t in tables]
        counts = np.concatenate([[0], *(np.diff(table.first_member) for table in tables)])
        seek_counts = np.concatenate([[0], *(np.diff(table.first_seek) for table in tables)])
        columns = {f.name: np.concatenate([getattr(t.clips, f.name) for t in tables]) for f in fields(Clips)}
        joined = ("channels", "offset", "size", "seek_stamp", "seek_begin")
        return cls(
            keys=tuple(key for table in tables for key in table.keys),
            clips=Clips(**columns),
            extensions=extensions,
            first_member=np.cumsum(counts),
            extension=np.concatenate(renumbered),
            first_seek=np.cumsum(seek_counts),
            **{name: np.concatenate([getattr(table, name) for table in tables]) for name in joined},
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, row: Any) -> Any:
        """Returns one row."""
        row = range(len(self))[row]
        members = range(self.first_member[row], self.first_member[row + 1])
        seeks = slice(self.first_seek[row], self.first_seek[row + 1])
        clips = self.clips
        return Sample(
            self.keys[row], Media(clips.media[row]), int(self.channels[row]), int(clips.num_frames[row]),
            int(clips.height[row]), int(clips.width[row]), float(clips.fps[row]), float(clips.duration[row]),
            int(clips.caption_length[row]),
            {self.extensions[self.extension[m]]: ByteRange(int(self.offset[m]), int(self.size[m])) for m in members},
            tuple(map(Seek, self.seek_stamp[seeks].tolist(), self.seek_begin[seeks].tolist())),
        )  # fmt: skip

    def update(self, digest: hashlib._Hash) -> None:
        """Adds all that decides what a sample holds to a hash: not where its decoding may begin."""
        digest.update(repr((self.keys, self.extensions)).encode("utf-8", "surrogatepass"))
        for column in self._columns().values():
            digest.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())

    def to_json(self) -> dict[str, Any]:
        """The columns as lists."""
        columns = {name: column.tolist() for name, column in (self._columns() | self._seek_columns()).items()}
        return {"keys": list(self.keys), "extensions": list(self.extensions), **columns}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Samples:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        keys, counts = tuple(table["keys"]), np.array(table["member_counts"], np.int64)
        columns = {name: np.array(table[name], dtype) for name, dtype in _DTYPES.items()}
        # Older tables know no key frames: then every video is decoded from its start.
        seeks = {name: np.array(table.get(name, ()), np.int64) for name in ("seek_stamp", "seek_begin")}
        seek_counts = np.array(table.get("seek_counts", [0] * len(keys)), np.int64)
        clips = {name: columns.pop(name) for name in _CLIP_COLUMNS}
        columns["first_member"] = np.concatenate([[0], np.cumsum(counts)])
        columns |= {"first_seek": np.concatenate([[0], np.cumsum(seek_counts)]), **seeks}
        source = np.zeros(len(keys), np.int32)
        rows = {len(keys), *map(len, (counts, seek_counts, columns["channels"], *clips.values()))}
        members = {int(counts.sum()), *(len(columns[name]) for name in ("extension", "offset", "size"))}
        key_frames = {int(seek_counts.sum()), *map(len, seeks.values())}
        if max(len(rows), len(members), len(key_frames)) > 1:
            raise ValueError(f"its columns have {sorted(rows)} rows, {sorted(members)} members and {key_frames} seeks")
        return cls(keys=keys, extensions=tuple(table["extensions"]), clips=Clips(**clips, source=source), **columns)

    def _columns(self) -> dict[str, NDArray[Any]]:
        clips = {name: getattr(self.clips, name) for name in _CLIP_COLUMNS}
        members = {"extension": self.extension, "offset": self.offset, "size": self.size}
        return {"channels": self.channels, **clips, "member_counts": np.diff(self.first_member), **members}

    def _seek_columns(self) -> dict[str, NDArray[Any]]:
        counts = np.diff(self.first_seek)
        return {"seek_counts": counts, "seek_stamp": self.seek_stamp, "seek_begin": self.seek_begin}


_DTYPES = {
    "channels": np.int32, "width": np.int32, "height": np.int32, "num_frames": np.int32, "fps": np.float64,
    "duration": np.float64, "media": np.uint8, "caption_length": np.int32, "extension": np.int32, "offset": np.int64,
    "size": np.int64,
}  # fmt: skip

_CLIP_COLUMNS = [field.name for field in fields(Clips) if field.name != "source"]
