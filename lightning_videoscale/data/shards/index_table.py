"""The index on disk: a folder of Arrow files, which all processes of a machine map into memory and so share.

- ``HASH.arrow``, a part: the samples of some shards, a row each, and beside them what is known of these shards. A part
  is written once and never changed, so that whoever has mapped it may go on reading.
- ``index.json``: which shards of which parts make up the index, in order. It is replaced in one move.

A build adds parts for the shards that are new or have changed; all others stay where they are.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path

from lightning_videoscale.data.shards.columns import open_columns
from lightning_videoscale.data.shards.samples import Samples
from lightning_videoscale.data.shards.shard_entry import Facts, ShardEntry, Stored, no_index, read_lines

SUFFIX = ".arrow"
_UNFINISHED = ".unfinished"
_VERSION = 4
_PART = 2**20
"""Rows of a part, about: enough that few files hold an index, and few enough to be gathered in memory."""


class IndexTable:
    """The index that a user knows by a name.

    Args:
        name: ``table``, ``table.arrow`` or ``table.jsonl``: all name the folder ``table.arrow``. The last is also the
            file of an older release, which is read where there is no such folder.

    Attributes:
        folder: Where the table lies.
    """

    def __init__(self, name: Path) -> None:
        base = name.with_suffix("") if name.suffix in (SUFFIX, ".jsonl", ".json") else name
        self.folder = base.with_name(base.name + SUFFIX)
        self._lines = tuple(dict.fromkeys((name, base.with_name(f"{base.name}.jsonl"))))

    @property
    def is_current(self) -> bool:
        """Whether there is an index of this release."""
        return self._manifest.is_file()

    @property
    def older(self) -> Path | None:
        """The file of lines of an older release, as long as there is no index of this one."""
        return None if self.is_current else next((file for file in self._lines if file.is_file()), None)

    @property
    def exists(self) -> bool:
        """Whether there is an index of this or of an older release."""
        return self.is_current or self.older is not None

    def shards(self) -> list[ShardEntry]:
        """The shards of the index, in order.

        Raises:
            FileNotFoundError: If there is none.
            ShardError: If a file is something else.
        """
        if (older := self.older) is not None:
            return read_lines(older)
        return self._chosen({})

    def known(self) -> list[ShardEntry]:
        """All shards of all parts, maybe in several versions, and of the file of an older release; the index last."""
        if (older := self.older) is not None:
            return read_lines(older)
        parts = {file.name: _read_part(file) for file in sorted(self.folder.glob(f"*{SUFFIX}"))}
        return [*chain.from_iterable(parts.values()), *(self._chosen(parts) if self.is_current else ())]

    def journals(self) -> list[Path]:
        """What builds that were stopped, or are under way, have left beside the table."""
        names = (self.folder.name, *(file.name for file in self._lines))
        found = (self.folder.parent.glob(glob.escape(name) + ".*" + _UNFINISHED) for name in dict.fromkeys(names))
        return sorted({file for files in found for file in files})

    def new_journal(self) -> Path:
        """Where this process may note what it finds."""
        return self.folder.with_name(f"{self.folder.name}.{_process()}{_UNFINISHED}")

    def runs(self) -> list[tuple[str, int, int]]:
        """The index as it is kept: names of parts, and which of their shards, from the first to before the last."""
        with self._manifest.open(encoding="utf-8") as file:
            try:
                manifest = json.load(file)
                if manifest["version"] != _VERSION:
                    raise ValueError(f"it has version {manifest['version']}, this release reads {_VERSION}")
                return [(str(part), int(first), int(last)) for part, first, last in manifest["shards"]]
            except (ValueError, KeyError, TypeError) as error:
                raise no_index(self._manifest, error) from error

    def write_part(self, shards: Sequence[ShardEntry]) -> Path:
        """Adds a part that holds these shards."""
        rows = [
            {**shard.to_json(self.folder.parent), "extensions": shard.samples.extensions, "rows": len(shard.samples),
             "facts": shard.facts}
            for shard in shards
        ]  # fmt: skip
        about = json.dumps(rows, separators=(",", ":")).encode()
        # Several nodes may find the same and write it to a shared folder: then it has the same name.
        file = self.folder / f"{hashlib.sha256(about).hexdigest()[:16]}{SUFFIX}"
        columns = Samples.concatenate([shard.samples for shard in shards]).columns()
        _replace(file, lambda draft: columns.write(draft, about))
        return file

    def write_runs(self, runs: Sequence[tuple[str, int, int]]) -> None:
        """Says which shards of which parts make up the index."""
        content = json.dumps({"version": _VERSION, "shards": runs}) + "\n"
        _replace(self._manifest, lambda draft: draft.write_text(content, encoding="utf-8"))

    def _chosen(self, parts: dict[str, list[ShardEntry]]) -> list[ShardEntry]:
        """The shards of the index, of parts by name, of which those that are not given are read."""
        entries: list[ShardEntry] = []
        for name, first, last in self.runs():
            if name not in parts:
                parts[name] = _read_part(self.folder / name)
            entries += parts[name][first:last]
        return entries

    @property
    def _manifest(self) -> Path:
        return self.folder / "index.json"


class TableWriter:
    """Makes shards the index, one after the other."""

    def __init__(self, table: IndexTable) -> None:
        self._table = table
        self._stored: list[Stored | None] = []
        self._waiting: list[ShardEntry] = []
        self._rows = 0

    def add(self, shard: ShardEntry) -> bool:
        """Adds a shard, and returns whether all that were added are on the disk now."""
        is_stored = shard.stored is not None and shard.stored.part.parent == self._table.folder
        self._stored.append(shard.stored if is_stored else None)
        if not is_stored:
            self._waiting.append(shard)
            self._rows += len(shard.samples)
        if self._rows >= _PART:
            self._write()
        return not self._waiting

    def finish(self) -> list[ShardEntry]:
        """Makes what was added the index, and returns it as it is read from there."""
        self._write()
        runs: list[tuple[str, int, int]] = []
        for part, number in (stored for stored in self._stored if stored is not None):
            if runs and runs[-1][0] == part.name and runs[-1][2] == number:
                runs[-1] = part.name, runs[-1][1], number + 1
            else:
                runs.append((part.name, number, number + 1))
        if not self._table.is_current or self._table.runs() != runs:
            self._table.write_runs(runs)
        return self._table.shards()

    def _write(self) -> None:
        if self._waiting:
            part = self._table.write_part(self._waiting)
            numbers = count()
            self._stored = [Stored(part, next(numbers)) if each is None else each for each in self._stored]
        self._waiting, self._rows = [], 0


def _read_part(file: Path) -> list[ShardEntry]:
    """The shards of a part, whose samples stay where they are."""
    try:
        columns, about = open_columns(file)
        entries: list[ShardEntry] = []
        first = 0
        extensions: dict[tuple[str, ...], tuple[str, ...]] = {}  # mostly equal, so each is kept once
        for number, row in enumerate(json.loads(about)):
            each = tuple(row["extensions"])
            samples = Samples.part(columns, first, first + row["rows"], extensions.setdefault(each, each))
            facts, stored = Facts.from_json(row["facts"]), Stored(file, number)
            entries.append(ShardEntry.from_json(row, file.parents[1], samples, facts, stored))
            first += row["rows"]
        if first != len(columns):
            raise ValueError(f"its shards have {first} samples, and it has {len(columns)} rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise no_index(file, error) from error
    return entries


def _process() -> str:
    return f"{os.uname().nodename}.{os.getpid()}"


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file in one move: others see all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{_process()}")
    try:
        write(draft)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
