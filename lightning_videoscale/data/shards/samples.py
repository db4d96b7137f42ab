"""What is known of every sample: one row, and a table of rows by columns that may lie in several files."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.shapes import Clips, Media
from lightning_videoscale.data.shards.columns import Columns
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


class _Piece(NamedTuple):
    """Rows ``first`` to ``last`` of some columns, and the extensions that these number."""

    columns: Columns
    first: int
    last: int
    extensions: tuple[str, ...]


class Samples(Sequence[Sample]):
    """A table of N samples; a row is made when it is asked for.

    Its columns lie where they were written, often in files that are mapped into memory. So a table of many shards costs
    nothing until a column of all of them is asked for.

    Args:
        pieces: Its rows, in order.
    """

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = tuple(pieces)

    @classmethod
    def of(cls, rows: Sequence[Sample]) -> Samples:
        """Makes the table of these rows."""
        extensions = tuple(dict.fromkeys(extension for row in rows for extension in row.members))
        number = {extension: i for i, extension in enumerate(extensions)}
        members = [(number[extension], *at) for row in rows for extension, at in row.members.items()]
        extension, offset, size = np.array(members, np.int64).reshape(-1, 3).T
        stamp, begin = np.array([seek for row in rows for seek in row.seeks], np.int64).reshape(-1, 2).T
        columns = Columns.create(
            [row.key for row in rows],
            {name: [getattr(row, name) for row in rows] for name in ("channels", *_CLIP_COLUMNS)},
            [len(row.members) for row in rows],
            {"extension": extension, "offset": offset, "size": size},
            [len(row.seeks) for row in rows],
            {"seek_stamp": stamp, "seek_begin": begin},
        )
        return cls.part(columns, 0, len(columns), extensions)

    @classmethod
    def part(cls, columns: Columns, first: int, last: int, extensions: tuple[str, ...]) -> Samples:
        """Rows ``first`` to ``last`` of some columns, whose members have these extensions."""
        return cls([_Piece(columns, first, last, extensions)])

    @classmethod
    def concatenate(cls, tables: Sequence[Samples]) -> Samples:
        """Puts tables one below the other, and copies nothing."""
        return cls([piece for table in tables for piece in table._pieces])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: Any) -> Any:
        """Returns one row."""
        (columns, _, _, extensions), row = self._at(range(len(self))[row])
        members = range(columns.first_member[row], columns.first_member[row + 1])
        seeks = slice(columns.first_seek[row], columns.first_seek[row + 1])
        return Sample(
            columns.key(row), Media(columns.media[row]), int(columns.channels[row]), int(columns.num_frames[row]),
            int(columns.height[row]), int(columns.width[row]), float(columns.fps[row]), float(columns.duration[row]),
            int(columns.caption_length[row]),
            {
                extensions[columns.extension[m]]: ByteRange(int(columns.offset[m]), int(columns.size[m]))
                for m in members
            },
            tuple(map(Seek, columns.seek_stamp[seeks].tolist(), columns.seek_begin[seeks].tolist())),
        )  # fmt: skip

    def key(self, row: int) -> str:
        """The name of one row."""
        piece, row = self._at(row)
        return piece.columns.key(row)

    @property
    def keys(self) -> tuple[str, ...]:
        """Name of each sample in its shard; (N,), made anew."""
        return tuple(columns.key(row) for columns, first, last, _ in self._pieces for row in range(first, last))

    @property
    def extensions(self) -> tuple[str, ...]:
        """The different extensions of members."""
        return tuple(dict.fromkeys(extension for piece in self._pieces for extension in piece.extensions))

    @property
    def channels(self) -> NDArray[np.int32]:
        """(N,) int32; 3 for images and videos."""
        return self._column("channels")

    @property
    def clips(self) -> Clips:
        """The columns that planning needs. A view if they lie in one file, else a copy."""
        columns = {name: self._column(name) for name in _CLIP_COLUMNS}
        return Clips(**columns, source=np.broadcast_to(np.int32(0), len(self)))

    def clips_at(self, rows: NDArray[np.int64]) -> Clips:
        """The same of some ascending rows, (n,), copied; of the other rows nothing is read."""
        begins = np.cumsum([0, *(last - first for _, first, last in self._runs)])
        cuts = np.searchsorted(rows, begins)
        found: dict[str, Any] = {name: np.empty(len(rows), getattr(_NONE, name).dtype) for name in _CLIP_COLUMNS}
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            columns, first, _ = self._runs[number]
            here = slice(cuts[number], cuts[number + 1])
            for name, column in found.items():
                column[here] = getattr(columns, name)[rows[here] - begins[number] + first]
        return Clips(**found, source=np.zeros(len(rows), np.int32))

    def with_member(self, names: Container[str]) -> NDArray[np.bool_]:
        """(N,) bool, which samples of a shard have a member of one of these extensions."""
        columns, extensions = self.columns(), self.extensions
        found = np.zeros(len(self), bool)
        numbers = [number for number, extension in enumerate(extensions) if extension in names]
        rows = np.repeat(np.arange(len(self)), np.diff(columns.first_member))
        found[rows[np.isin(columns.extension, numbers)]] = True
        return found

    def columns(self) -> Columns:
        """The columns of all rows. Extensions keep the number that they have in their shard."""
        return Columns.concatenate([(columns, first, last) for columns, first, last, _ in self._pieces])

    def update(self, digest: hashlib._Hash) -> None:
        """Adds all that decides what the samples of a shard hold to a hash: not where decoding may begin."""
        digest.update(repr((self.keys, self.extensions)).encode("utf-8", "surrogatepass"))
        for column in self._described().values():
            digest.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())

    def to_json(self) -> dict[str, Any]:
        """The columns of the samples of a shard, as lists."""
        columns = self.columns()
        counts = np.diff(columns.first_seek)
        seeks = {"seek_counts": counts, "seek_stamp": columns.seek_stamp, "seek_begin": columns.seek_begin}
        lists = {name: column.tolist() for name, column in (self._described() | seeks).items()}
        return {"keys": list(self.keys), "extensions": list(self.extensions), **lists}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Samples:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        keys = table["keys"]
        columns = Columns.create(
            keys,
            {name: table[name] for name in ("channels", *_CLIP_COLUMNS)},
            table["member_counts"],
            {name: table[name] for name in ("extension", "offset", "size")},
            # Older tables know no key frames: then every video is decoded from its start.
            table.get("seek_counts", [0] * len(keys)),
            {name: table.get(name, ()) for name in ("seek_stamp", "seek_begin")},
        )
        return cls.part(columns, 0, len(columns), tuple(table["extensions"]))

    @cached_property
    def _ends(self) -> list[int]:
        """Rows up to the end of each piece."""
        return [*accumulate(last - first for _, first, last, _ in self._pieces)]

    def _at(self, row: int) -> tuple[_Piece, int]:
        """The piece that holds a row, and its place in the columns there."""
        number = bisect_right(self._ends, row)
        piece = self._pieces[number]
        return piece, row + piece.last - self._ends[number]

    def _column(self, name: str) -> NDArray[Any]:
        parts = [getattr(columns, name)[first:last] for columns, first, last in self._runs]
        return parts[0] if len(parts) == 1 else np.concatenate([getattr(_NONE, name), *parts])

    @cached_property
    def _runs(self) -> tuple[tuple[Columns, int, int], ...]:
        """The pieces, those that are neighbours in their columns as one."""
        return tuple(self._joined())

    def _joined(self) -> Iterator[tuple[Columns, int, int]]:
        run: tuple[Columns, int, int] | None = None
        for columns, first, last, _ in self._pieces:
            if run is not None and run[0] is columns and run[2] == first:
                run = columns, run[1], last
                continue
            if run is not None:
                yield run
            run = columns, first, last
        if run is not None:
            yield run

    def _described(self) -> dict[str, NDArray[Any]]:
        """What a sample holds, by columns of one shard."""
        columns = self.columns()
        named = {name: getattr(columns, name) for name in ("channels", *_CLIP_COLUMNS)}
        members = {name: getattr(columns, name) for name in ("extension", "offset", "size")}
        return {**named, "member_counts": np.diff(columns.first_member), **members}


_NONE = Columns.concatenate([])
_CLIP_COLUMNS = [field.name for field in fields(Clips) if field.name != "source"]
