"""Columns of numbers and names of many samples, in memory or in an Arrow file that is mapped into it.

A file that is mapped is in the memory of a machine once, whichever processes read it, and only what is looked at is
read from the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_ROW = {
    "channels": np.int32, "width": np.int32, "height": np.int32, "num_frames": np.int32, "fps": np.float64,
    "duration": np.float64, "media": np.uint8, "caption_length": np.int32,
}  # fmt: skip
_MEMBER = {"extension": np.int32, "offset": np.int64, "size": np.int64}
_SEEK = {"seek_stamp": np.int64, "seek_begin": np.int64}
_TYPES: dict[str, Any] = _ROW | _MEMBER | _SEEK | {"key_bytes": np.uint8}
_LISTS = {"first_member": tuple(_MEMBER), "first_seek": tuple(_SEEK)}
"""Columns of any number of values per row, by the column that says where those of a row begin."""
_ABOUT = b"about"


def _list_of(types: Mapping[str, Any]) -> pa.DataType:
    return pa.large_list(pa.struct([pa.field(name, pa.from_numpy_dtype(dtype)) for name, dtype in types.items()]))


_SCHEMA = pa.schema(
    [
        ("key", pa.large_binary()),
        *((name, pa.from_numpy_dtype(dtype)) for name, dtype in _ROW.items()),
        ("members", _list_of(_MEMBER)),
        ("seeks", _list_of(_SEEK)),
    ]
)


@dataclass(frozen=True, eq=False)
class Columns:
    """N rows with M members and S key frames to seek. Pickled, columns of a file are its name alone.

    Attributes:
        first_byte: (N + 1,) int64, where the key of each row begins in ``key_bytes``.
        key_bytes: uint8, the keys in UTF-8, one behind the other.
        channels: (N,) int32.
        width: (N,) int32, as of `Clips`; so are all until ``caption_length``.
        height: (N,) int32.
        num_frames: (N,) int32.
        fps: (N,) float64.
        duration: (N,) float64.
        media: (N,) uint8.
        caption_length: (N,) int32.
        first_member: (N + 1,) int64, the place of each row's first member in the columns below.
        extension: (M,) int32, each member's number among the extensions of its shard.
        offset: (M,) int64, where it lies in its shard, in bytes.
        size: (M,) int64, its length in bytes.
        first_seek: (N + 1,) int64, the place of each row's first key frame in the columns below.
        seek_stamp: (S,) int64, `Seek.stamp` of each.
        seek_begin: (S,) int64, `Seek.begin` of each.
        file: Where they lie; None: in memory.
    """

    first_byte: NDArray[np.int64]
    key_bytes: NDArray[np.uint8]
    channels: NDArray[np.int32]
    width: NDArray[np.int32]
    height: NDArray[np.int32]
    num_frames: NDArray[np.int32]
    fps: NDArray[np.float64]
    duration: NDArray[np.float64]
    media: NDArray[np.uint8]
    caption_length: NDArray[np.int32]
    first_member: NDArray[np.int64]
    extension: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    first_seek: NDArray[np.int64]
    seek_stamp: NDArray[np.int64]
    seek_begin: NDArray[np.int64]
    file: Path | None = None

    @classmethod
    def create(
        cls,
        keys: Sequence[str],
        rows: dict[str, Any],
        member_counts: Any,
        members: dict[str, Any],
        seek_counts: Any,
        seeks: dict[str, Any],
    ) -> Columns:
        """Columns of lists.

        Args:
            keys: Name of each row.
            rows: The columns with one value per row.
            member_counts: Members of each row.
            members: The columns of members.
            seek_counts: Key frames of each row.
            seeks: The columns of key frames.

        Raises:
            ValueError: If they are not equally long.
        """
        encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
        counts: dict[str, Any] = {
            "first_member": np.array(member_counts, np.int64),
            "first_seek": np.array(seek_counts, np.int64),
        }
        columns: dict[str, Any] = {
            name: np.array(values, _TYPES[name]) for name, values in (rows | members | seeks).items()
        }
        lengths = {len(keys), *map(len, counts.values()), *(len(columns[name]) for name in _ROW)}
        found = {first: {int(counts[first].sum()), *(len(columns[name]) for name in names)}
                 for first, names in _LISTS.items()}  # fmt: skip
        if max(map(len, (lengths, *found.values()))) > 1:
            raise ValueError(f"its columns have {sorted(lengths)} rows and {found} values")
        return cls(
            first_byte=_starts([len(key) for key in encoded]),
            key_bytes=np.frombuffer(b"".join(encoded), np.uint8),
            first_member=_starts(counts["first_member"]),
            first_seek=_starts(counts["first_seek"]),
            **columns,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[tuple[Columns, int, int]]) -> Columns:
        """Rows ``first`` to ``last`` of each of some columns, one below the other, copied into memory."""
        joined: dict[str, Any] = {name: _joined(parts, name) for name in _ROW}
        for start, names in (*_LISTS.items(), ("first_byte", ("key_bytes",))):
            begins = [getattr(columns, start)[first : last + 1] for columns, first, last in parts]
            joined[start] = _starts(np.concatenate([np.empty(0, np.int64), *map(np.diff, begins)]))
            spans = [(columns, begin[0], begin[-1]) for (columns, _, _), begin in zip(parts, begins, strict=True)]
            joined |= {name: _joined(spans, name) for name in names}
        return cls(**joined)

    def write(self, file: Path, about: bytes) -> None:
        """Writes the columns to a new file, and ``about`` them what `open_columns` returns beside them."""
        key = pa.Array.from_buffers(
            pa.large_binary(), len(self), [None, pa.py_buffer(self.first_byte), pa.py_buffer(self.key_bytes)]
        )
        lists = [
            pa.LargeListArray.from_arrays(
                getattr(self, first),
                pa.StructArray.from_arrays([pa.array(getattr(self, name)) for name in names], names=list(names)),
            )
            for first, names in _LISTS.items()
        ]
        schema = _SCHEMA.with_metadata({_ABOUT: about})
        columns = [key, *(pa.array(getattr(self, name)) for name in _ROW), *lists]
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))

    def __len__(self) -> int:
        return len(self.media)

    def __reduce__(self) -> tuple[Callable[..., Columns], tuple[Any, ...]]:
        if self.file is not None:
            return _reopened, (self.file,)
        return Columns, tuple(getattr(self, field.name) for field in fields(self))

    def key(self, row: int) -> str:
        """The name of a row."""
        return (
            self.key_bytes[self.first_byte[row] : self.first_byte[row + 1]].tobytes().decode("utf-8", "surrogatepass")
        )


def open_columns(file: Path) -> tuple[Columns, bytes]:
    """Maps a file into memory, and returns its columns and what was written about them.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is not what `Columns.write` writes.
    """
    batches = pa.ipc.open_file(pa.memory_map(str(file)))
    if not batches.schema.equals(_SCHEMA) or batches.num_record_batches != 1:
        raise ValueError(f"{file} is an Arrow file, but none of samples")
    batch = batches.get_batch(0)
    batch.validate()
    columns = {name: batch.column(name).to_numpy() for name in _ROW}
    _, starts, content = batch.column("key").buffers()
    columns["first_byte"] = np.frombuffer(starts, np.int64, len(batch) + 1) if len(batch) else np.zeros(1, np.int64)
    columns["key_bytes"] = np.frombuffer(content or b"", np.uint8)
    for (first, names), column in zip(_LISTS.items(), (batch.column("members"), batch.column("seeks")), strict=True):
        columns[first] = column.offsets.to_numpy()
        columns |= {name: column.values.field(name).to_numpy() for name in names}
    return Columns(**columns, file=file), batches.schema.metadata[_ABOUT]


def _reopened(file: Path) -> Columns:
    return open_columns(file)[0]


def _starts(counts: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _joined(spans: Sequence[tuple[Columns, int, int]], name: str) -> NDArray[Any]:
    return np.concatenate(
        [np.empty(0, _TYPES[name]), *(getattr(each, name)[first:last] for each, first, last in spans)]
    )
