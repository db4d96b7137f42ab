"""Folders of videos where shards are asked for: packed on the way, and packed again only where they have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lightning_videoscale.data.packing.manifest import complete_shards
from lightning_videoscale.data.packing.one_at_a_time import one_at_a_time
from lightning_videoscale.data.packing.pack_folder import PackReport, pack_folder
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import CACHE, default_index_file
from lightning_videoscale.data.shards.location import is_remote
from lightning_videoscale.data.shards.patterns import Patterns, expand_each

_SHOWN = 3


class Found(NamedTuple):
    """The shards that some patterns and folders mean.

    Attributes:
        groups: Paths and URLs, by group and pattern.
        index_file: Where their index is kept by default. Of a folder the same however many shards it has, so that
            only what is packed again is indexed again.
    """

    groups: list[list[list[str]]]
    index_file: Path

    @property
    def shards(self) -> list[str]:
        """All of them, in order."""
        return [shard for each in self.groups for shards in each for shard in shards]

    @property
    def distinct(self) -> list[str]:
        """All of them, each once however many patterns mean it: what an index is kept of."""
        return list(dict.fromkeys(self.shards))


def pack_on_the_way(
    groups: Sequence[Patterns], captions: Path | None = None, *, say: Callable[[str], None], workers: int = 1
) -> Found:
    """Finds the shards of patterns, and packs the folders of videos and images among them; see `packed_folder`.

    A folder that is packed already is compared with its files, by their names, sizes, times and captions, and packed
    again where it has changed. Of several processes one packs, and the others wait.

    Args:
        groups: Patterns of shards, see `expand_each`, and local folders. No group names a shard twice.
        captions: The table of captions of the folders; None: see `pack_folder`.
        say: Is told that a folder is packed, and what became of it.
        workers: Shards that are written at a time.

    Raises:
        ShardError: As `expand_each` and `pack_folder` do; if there are captions and no folder.
        TimeoutError: If another process packs the folder, and stands still.
        OSError: If a file cannot be read or written.
    """
    return _find(groups, captions, partial(_pack, captions=captions, say=say, workers=workers))


def already_packed(groups: Sequence[Patterns], captions: Path | None = None) -> Found:
    """The same without packing: what `pack_on_the_way` has found before, here or in another process.

    Raises:
        ShardError: Also if a folder is not packed yet.
    """
    return _find(groups, captions, partial(_packed, captions=captions))


def packed_folder(folder: Path, captions: Path | None = None) -> Path:
    """Where a folder is packed to: ``videos.packed`` beside ``videos``, with captions ``videos.packed-by-TABLE-HASH``.

    The hash is that of the table's path from the folder, so that tables of one name have shards of their own, and both
    may move. In the user's cache where the folder lies in one that cannot be written.
    """
    folder = folder.resolve()
    name = f"{folder.name}.packed" + ("" if captions is None else f"-by-{_named(captions, folder)}")
    beside = folder.with_name(name)
    if os.access(beside if beside.exists() else folder.parent, os.W_OK):
        return beside
    return CACHE.expanduser() / f"{_short_hash(str(folder))}-{name}"


def _named(captions: Path, folder: Path) -> str:
    return f"{captions.stem}-{_short_hash(os.path.relpath(captions.resolve(), folder))}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _find(groups: Sequence[Patterns], captions: Path | None, of_folder: Callable[[Path], list[str]]) -> Found:
    outputs: set[Path] = set()

    def noted(folder: Path) -> list[str]:
        outputs.add(packed_folder(folder, captions))
        return of_folder(folder)

    each = [expand_each(patterns, noted) for patterns in groups]
    if captions is not None and not outputs:
        raise ShardError(
            f"The captions {captions} are for folders of videos and images, and {list(groups)} name shards, which hold "
            "theirs. Videos are packed with other captions by: videoscale pack FOLDER OUTPUT --captions FILE"
        )
    found = Found(each, Path())
    names = [
        str(Path(shard).parent / "*.tar") if not is_remote(shard) and Path(shard).parent in outputs else shard
        for shard in found.shards
    ]
    return found._replace(index_file=default_index_file(list(dict.fromkeys(names))))


def _pack(folder: Path, captions: Path | None, say: Callable[[str], None], workers: int) -> list[str]:
    output = packed_folder(folder, captions)
    with one_at_a_time(output):
        if complete_shards(output) is None:
            say(
                f"{folder} is a folder of videos or images: it is packed into {output}, which takes as much space "
                "again. Later runs pack only what has changed."
            )
        try:
            report = pack_folder(folder, output, captions, workers=workers, progress=True)
        except ShardError as error:
            raise ShardError(f"{error} (while {folder} was packed into {output})") from error
    if report.written or report.left_out or report.strangers:
        say(_told(folder, output, report))
    if not report.samples:
        raise ShardError(f"None of the files of {folder} can be used: videoscale pack '{folder}' OUTPUT lists them.")
    return [str(shard) for shard in report.shards]


def _told(folder: Path, output: Path, report: PackReport) -> str:
    parts = [
        f"{folder}: {report.samples} samples in {len(report.shards)} shards ({report.written} written now) -> {output}",
        report.captioned,
    ]
    for title, lines in (
        ("named there, but no file", report.strangers),
        ("left out", [f"{file}: {reason}" for file, reason in report.left_out]),
    ):
        if lines:
            parts.append(f"{len(lines)} {title}: {'; '.join(lines[:_SHOWN])}{'; …' * (len(lines) > _SHOWN)}")
    return ". ".join(parts)


def _packed(folder: Path, captions: Path | None) -> list[str]:
    output = packed_folder(folder, captions)
    shards = complete_shards(output)
    if shards is None:
        option = "" if captions is None else f" --captions '{captions}'"
        raise ShardError(
            f"{folder} is not packed yet, or not to its end ({output}): run `videoscale index '{folder}'{option}` "
            "first, on every node that does not share that disk. Without a Trainer, call prepare_data() first."
        )
    return [str(shard) for shard in shards]
