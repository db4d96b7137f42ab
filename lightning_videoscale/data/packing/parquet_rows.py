"""Parquet: tables of captions, and videos and images that lie in the rows of a folder's files.

So img2dataset and video2dataset write them with ``output_format="parquet"``, with the bytes in a column ``jpg`` or
``mp4``; and so does `datasets`, with ``bytes`` and ``path`` in a column ``image`` or ``video``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_videoscale.data.packing.caption_files import CAPTION_COLUMNS, CaptionRow, find_column, text_of
from lightning_videoscale.data.packing.items import Content, Item, cut_pieces, plain_key
from lightning_videoscale.data.packing.media_files import FolderListing, count_kinds
from lightning_videoscale.data.packing.tables import open_parquet, plain_columns
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES

_EXTENSIONS = {"video": "mp4", "image": "jpg"} | {name: name for name in sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES)}
"""Columns that hold bytes, and the extension of a sample where no path tells: what it is, the content says."""


class ParquetRows:
    """The videos and images in the rows of a folder's Parquet files.

    Args:
        folder: The folder.
        listing: Its files.
        caption_column: The column of captions. None: ``txt``, or the first of `CAPTION_COLUMNS`; rows may have none.

    Attributes:
        ignored: See `Source`.

    Raises:
        ShardError: If a file is damaged, or lacks a column of bytes, or that of captions which is named.
        ModuleNotFoundError: If pyarrow is not installed.
    """

    def __init__(self, folder: Path, listing: FolderListing, caption_column: str | None) -> None:
        self._files = {name: _RowFile(folder, name, caption_column) for name in listing.of_kind("parquet")}
        self.ignored: Mapping[str, int] = count_kinds(file for file in listing.others if file not in self._files)

    def pieces(self, samples: int, size: int) -> list[list[Item]]:
        """See `Source`; no piece has rows of two files."""
        return [piece for file in self._files.values() for piece in cut_pieces(list(file.items()), samples, size)]

    def contents(self, piece: Sequence[Item]) -> Iterator[tuple[Item, Content]]:
        """See `Source`."""
        file, first = _place(piece[0].name)
        for item, value in zip(piece, self._files[file].values(first), strict=False):
            yield item, _content(value, self._files[file].column)


class _RowFile:
    """One Parquet file."""

    def __init__(self, folder: Path, name: str, caption_column: str | None) -> None:
        self._path, self._name = folder / name, name
        with open_parquet(self._path) as parquet:
            columns = parquet.schema_arrow.names
            self.column = _media_column(self._path, parquet.schema_arrow)
            usual = ("txt", *CAPTION_COLUMNS)
            self._caption: str | None = None
            if caption_column is not None or any(column.strip().lower() in usual for column in columns):
                self._caption = find_column(
                    self._path, columns, caption_column, usual, "its caption", "--caption-column"
                )

    def items(self) -> Iterator[Item]:
        """All rows, without their bytes."""
        state = self._path.stat()
        prefix = plain_key(self._name.removesuffix(".parquet") + "/")
        with open_parquet(self._path) as parquet:
            size = state.st_size // max(1, parquet.metadata.num_rows)
            columns = [column for column in plain_columns(parquet.schema_arrow) if column != self.column]
            rows = (row for batch in parquet.iter_batches(columns=columns) for row in batch.to_pylist())
            if not columns:
                rows = ({} for _ in range(parquet.metadata.num_rows))
            for number, row in enumerate(rows):
                text = row.pop(self._caption, None) if self._caption is not None else None
                caption = CaptionRow(*text_of(text, self._caption or "", row))
                yield Item(f"{self._name}#{number}", f"{prefix}{number:08}", size, state.st_mtime_ns, caption)

    def values(self, first: int) -> Iterator[Any]:
        """What the column of bytes holds from a row on."""
        with open_parquet(self._path) as parquet:
            groups = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
            begin = 0
            while begin < len(groups) and first >= groups[begin]:
                first -= groups[begin]
                begin += 1
            for group in range(begin, len(groups)):
                # A few rows at a time: a group of videos may be larger than memory.
                for batch in parquet.iter_batches(batch_size=16, row_groups=[group], columns=[self.column]):
                    values = batch.column(0)[min(first, len(batch)) :]
                    first = max(0, first - len(batch))
                    yield from (value.as_py() for value in values)


def _place(name: str) -> tuple[str, int]:
    file, _, row = name.rpartition("#")
    return file, int(row)


def _media_column(file: Path, schema: Any) -> str:
    """The column that holds bytes of videos or images."""
    by_name = {field.name.strip().lower(): field for field in schema}
    for name in _EXTENSIONS:
        if name in by_name and (_is_binary(by_name[name].type) or _is_struct(by_name[name].type)):
            return str(by_name[name].name)
    found = ", ".join(f"{field.name} ({field.type})" for field in schema)
    raise ShardError(
        f"{file} has no column with the bytes of videos or images ({', '.join(_EXTENSIONS)}); it has {found}. If it "
        "is a table of captions, name it with --captions of `videoscale pack`, and the folder of the files."
    )


def _is_binary(kind: Any) -> bool:
    return str(kind) in ("binary", "large_binary")


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<") and any(
        kind.field(number).name == "bytes" and _is_binary(kind.field(number).type) for number in range(kind.num_fields)
    )


def _content(value: Any, column: str) -> Content:
    extension, path = _EXTENSIONS[column.strip().lower()], ""
    if isinstance(value, dict):
        value, path = value.get("bytes"), str(value.get("path") or "")
    own = PurePosixPath(path).suffix[1:].lower()
    extension = own if own in _EXTENSIONS else extension
    if not value:
        return Content(extension, 0, None, f"its column {column!r} holds no bytes")
    return Content(extension, len(value), io.BytesIO(value))
