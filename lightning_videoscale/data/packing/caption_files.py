"""Captions as trainers keep them: a table with a row for each file, or a text beside it.

A row names its file by a path from the folder of the videos or from that of the table, by an absolute path, or by its
bare name; with or without the extension. An absolute path that leads elsewhere counts by its end, since folders are
moved. Accents are compared in one form (Unicode's NFC), as macOS writes another.
"""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from lightning_videoscale.data.packing.tables import parquet_rows
from lightning_videoscale.data.shards.errors import ShardError

FILE_COLUMNS = (
    *("file_name", "filename", "file", "path", "media_path", "file_path", "filepath"),
    *("video", "video_path", "videopath", "video_file", "image", "image_path", "image_file", "clip", "clip_path"),
    *("name", "key", "videoid", "video_id", "id"),
)
"""Columns that are looked for, in this order and in any case, where none is named: what names a row's file."""

CAPTION_COLUMNS = ("caption", "captions", "cap", "text", "prompt", "description", "sentence")
"""Likewise: what describes it."""

TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json", "metadata.parquet")
"""Names under which a table is found in the folder of the videos."""

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")


class CaptionRow(NamedTuple):
    """A file's caption, and all that its row says beside it."""

    text: str
    fields: Mapping[str, Any]


class Captions(NamedTuple):
    """What a table says of some files.

    Attributes:
        by_file: The captions of the files that it names, by path from the folder.
        strangers: What rows name and no file is, in the order of the table.
    """

    by_file: dict[str, CaptionRow]
    strangers: list[str]


def read_captions(
    table: Path, folder: Path, files: Sequence[str], file_column: str | None = None, caption_column: str | None = None
) -> Captions:
    """Reads a table of captions.

    Args:
        table: ``.csv``, ``.tsv``, ``.parquet``, ``.jsonl`` or ``.ndjson``, or ``.json``: a list of objects, or an
            object with a caption, or an object that holds it, for every file.
        folder: The folder of the files.
        files: Their paths from the folder, as POSIX paths.
        file_column: The column that names the file. None: the first of `FILE_COLUMNS`.
        caption_column: Likewise, of `CAPTION_COLUMNS`.

    Raises:
        ShardError: If the table cannot be read, lacks such a column, names a file twice, or names none of the files.
        ModuleNotFoundError: If it is Parquet and pyarrow is not installed.
    """
    columns, rows = _rows(table)
    if not columns:
        raise ShardError(f"The table of captions {table} is empty.")
    file_column = find_column(table, columns, file_column, FILE_COLUMNS, "the file of a row", "--file-column")
    caption_column = find_column(table, columns, caption_column, CAPTION_COLUMNS, "its caption", "--caption-column")
    find = _Finder(folder, table.parent, files)
    found = Captions({}, [])
    for row in rows:
        named = row.get(file_column)
        name = "" if named is None else str(named)  # 0 is a name, too
        file = find(name)
        if file is None:
            found.strangers.append(name)
        elif file in found.by_file:
            raise ShardError(f"{table} has two rows for {file!r} (the second names it {name!r}); keep one of them.")
        else:
            _check_text(table, name, row)
            others = {key: value for key, value in row.items() if key not in (file_column, caption_column)}
            found.by_file[file] = CaptionRow(*text_of(row.get(caption_column), caption_column, others))
    if not found.by_file:
        holds = repr(found.strangers[0]) if rows else "nothing"
        raise ShardError(
            f"{table} names none of the {len(files)} videos and images in {folder}: its column {file_column!r} holds "
            f"{holds}, and the first file is {files[0]!r}. Paths may start at that folder, at the "
            "table's, or be bare names; --file-column of `videoscale pack` names another column."
        )
    return found


def _check_text(table: Path, name: str, row: Mapping[str, Any]) -> None:
    """JSON may hold half of a character, where a text was cut within an emoji: no shard can hold that."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        part = repr(error.object[max(0, error.start - 20) : error.end])
        raise ShardError(f"{table} holds half of a character in the row of {name!r}, at the end of {part}.") from error


def caption_beside(path: Path) -> CaptionRow:
    """The caption in the text file beside a video (``clip.mp4``, ``clip.txt``); empty where there is none.

    Raises:
        ShardError: If it is no UTF-8.
    """
    beside = next(filter(Path.is_file, map(path.with_suffix, (".txt", ".TXT"))), None)
    return CaptionRow("" if beside is None else _read(beside).strip(), {})


class _Finder:
    """Finds the file that a row names."""

    def __init__(self, folder: Path, beside: Path, files: Sequence[str]) -> None:
        self._folders = (folder, beside)
        # Files may be links, as in the cache of the Hugging Face Hub, and a link's row is not that of what it leads to.
        # So a path counts as it is written; else with the links before its name followed, and at last with all.
        root = os.path.realpath(folder)
        self._readings = ((os.path.abspath, os.path.abspath(folder)), (_in_real_folder, root), (os.path.realpath, root))
        names = [(unicodedata.normalize("NFC", file), file) for file in files]
        bare = [(name.rpartition("/")[2], file) for name, file in names]
        # In full, and without the extension; of forms that several files have none is meant.
        self._paths = _unique((_stem(name), file) for name, file in names) | dict(names)
        self._bare = _unique((_stem(name), file) for name, file in bare) | _unique(bare)

    def __call__(self, name: str) -> str | None:
        name = unicodedata.normalize("NFC", name.strip().replace("\\", "/"))
        places = [folder / name for folder in self._folders]  # an absolute path stays what it is
        for read, root in self._readings:
            for place in places:
                path = _inside(read, place, root)
                if path is not None and path in self._paths:
                    return self._paths[path]
        if "/" not in name:
            return self._bare.get(name)
        parts = name.split("/") if PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute() else []
        ends = ("/".join(parts[start:]) for start in range(1, len(parts)))
        return next((self._paths[end] for end in ends if end in self._paths), None)


def _in_real_folder(path: Path) -> str:
    return os.path.join(os.path.realpath(path.parent), path.name)


def _inside(read: Callable[[Path], str], path: Path, root: str) -> str | None:
    try:
        return unicodedata.normalize("NFC", Path(read(path)).relative_to(root).as_posix())
    except (ValueError, OSError):  # elsewhere; or no path at all
        return None


def _unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    pairs = list(pairs)
    counts = Counter(form for form, _ in pairs)
    return {form: file for form, file in pairs if counts[form] == 1}


def _stem(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return stem if dot and "/" not in suffix else name


def find_column(
    table: Path, columns: Sequence[str], wanted: str | None, usual: Sequence[str], what: str, option: str
) -> str:
    """Returns the column that is wanted, or the first one of the usual names.

    Raises:
        ShardError: If there is none, with the columns that there are.
    """
    if wanted is not None:
        if wanted not in columns:
            raise ShardError(f"{table} has no column {wanted!r}; it has {columns}.")
        return wanted
    by_name = {column.strip().lower(): column for column in columns}
    for name in usual:
        if name in by_name:
            return by_name[name]
    raise ShardError(
        f"{table} has the columns {columns}, none of which is known to hold {what} ({', '.join(usual)}): name it "
        f"with {option} of `videoscale pack`. A CSV file begins with a line of column names."
    )


def text_of(value: Any, column: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The caption that a cell holds, and the fields; of a list of captions the first, and all of them as a field."""
    if isinstance(value, list):
        texts = [_text_of(each) for each in value]
        return next(filter(None, texts), ""), fields | {column: texts}
    return _text_of(value), fields


def _text_of(value: Any) -> str:
    # pandas says NaN where there is nothing.
    return "" if value is None or value != value else str(value).strip()


def _rows(table: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns of a table, and its rows."""
    suffix = table.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ShardError(f"{table} is no table of captions: its name must end in one of {', '.join(_SUFFIXES)}.")
    if not table.is_file():
        raise ShardError(f"There is no table of captions {table}. The current folder is {Path.cwd()}.")
    if suffix == ".parquet":
        return parquet_rows(table)
    text = _read(table)
    if suffix in (".csv", ".tsv"):
        return _separated(table, text, "\t" if suffix == ".tsv" else ",")
    try:
        if suffix == ".json":
            rows = list(_objects(table, json.loads(text)))
        else:
            rows = [_object(table, json.loads(line)) for line in text.split("\n") if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise ShardError(f"The table of captions {table} is damaged: {error}") from error
    return list(dict.fromkeys(name for row in rows for name in row)), rows


def _separated(table: Path, text: str, delimiter: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and rows of a table of text; a quote or a comma that is not meant so would move or end captions."""
    # Not by `splitlines`, which also ends lines at characters that captions hold (U+2028, form feeds).
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = []
    try:
        for row in reader:
            if any(behind := row.pop(None, [])):  # cells without a column
                raise ShardError(
                    f"{table} has more cells than columns in the row up to line {reader.line_num}, the last of them "
                    f"{behind[-1]!r}: put a text that holds {delimiter!r} in double quotes, right behind the delimiter."
                )
            rows.append({name: cell for name, cell in row.items() if name})
    except csv.Error as error:
        raise ShardError(
            f"The table of captions {table} is damaged in the row from line {reader.line_num + 1} on: {error}. A text "
            "that begins with a double quote must be in double quotes, with those in it doubled."
        ) from error
    return list(reader.fieldnames or ()), rows


def _objects(table: Path, content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict):
        for name, value in content.items():
            yield {"file_name": name} | (value if isinstance(value, dict) else {"caption": value})
    elif isinstance(content, list):
        for row in content:
            yield _object(table, row)
    else:
        raise ShardError(f"{table} holds a {type(content).__name__}; it must hold a list of objects, or an object.")


def _object(table: Path, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ShardError(f"{table} holds {row!r} where an object with a file and its caption must be.")
    return row


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ShardError(f"{file} is not UTF-8 ({error}); save it as UTF-8.") from error
