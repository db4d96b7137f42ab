"""The videos and images of a folder, with their captions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_videoscale.data.packing.caption_files import (
    TABLES,
    CaptionRow,
    Captions,
    caption_beside,
    read_captions,
)
from lightning_videoscale.data.packing.items import Content, Item, cut_pieces, unique_keys
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES


class FolderListing(NamedTuple):
    """The files of a folder and of the folders in it, as POSIX paths from it, sorted."""

    media: list[str]
    others: list[str]

    def of_kind(self, extension: str) -> list[str]:
        """Those of the rest with an extension."""
        return [file for file in self.others if _extension(file) == extension]


def list_folder(folder: Path, output: Path) -> FolderListing:
    """Lists the files of a folder, but for hidden ones and those of the output.

    Raises:
        ShardError: If there is no such folder.
    """
    if folder.is_file():
        what = "a video or an image" if _extension(folder.name) in VIDEO_SUFFIXES | IMAGE_SUFFIXES else "a file"
        raise ShardError(
            f"{folder} is {what}, and no folder of them: videoscale pack '{folder.parent}' '{output}'. A table of "
            "captions goes behind --captions."
        )
    if not folder.is_dir():
        raise ShardError(f"{folder} is no folder of videos and images. The current folder is {Path.cwd()}.")
    seen, files = {output.resolve(), folder.resolve()}, []  # links may lead in circles
    for parent, folders, names in os.walk(folder, followlinks=True):
        inner = {name: (Path(parent) / name).resolve() for name in sorted(folders) if not name.startswith(".")}
        folders[:] = [name for name, path in inner.items() if path not in seen]
        seen |= set(inner.values())
        below = Path(parent).relative_to(folder)
        files += [(below / name).as_posix() for name in names if not name.startswith(".")]
    files.sort()
    known = VIDEO_SUFFIXES | IMAGE_SUFFIXES
    return FolderListing([f for f in files if _extension(f) in known], [f for f in files if _extension(f) not in known])


class MediaFiles:
    """The videos and images of a folder.

    Args:
        folder: The folder.
        listing: Its files.
        captions: A table of captions; None: one in the folder, else the text beside each file.
        file_column: See `read_captions`.
        caption_column: See `read_captions`.

    Attributes:
        ignored: See `Source`.
        table: The table that captions are from; None: texts beside the files.
        strangers: What it names and no file is.

    Raises:
        ShardError: If the table is unusable, a name is not UTF-8, or tables lie in inner folders alone.
    """

    def __init__(
        self,
        folder: Path,
        listing: FolderListing,
        captions: Path | None,
        file_column: str | None,
        caption_column: str | None,
    ) -> None:
        self._folder = folder
        self.table = captions or next((file for name in TABLES if (file := folder / name).is_file()), None)
        if self.table is None:
            _check_inner_tables(folder, listing.others)
        found = Captions({}, [])
        if self.table is not None:
            found = read_captions(self.table, folder, listing.media, file_column, caption_column)
        self.strangers = tuple(found.strangers)
        by_file = None if self.table is None else found.by_file
        pairs = zip(listing.media, unique_keys(listing.media), strict=True)
        self._items = [_item(folder, file, key, by_file) for file, key in pairs]
        self.ignored: Mapping[str, int] = count_kinds(file for file in listing.others if _extension(file) != "txt")

    def pieces(self, samples: int, size: int) -> list[list[Item]]:
        """See `Source`."""
        return list(cut_pieces(self._items, samples, size))

    def contents(self, piece: Sequence[Item]) -> Iterator[tuple[Item, Content]]:
        """See `Source`."""
        for item in piece:
            extension = _extension(item.name)
            try:
                file = (self._folder / item.name).open("rb")
            except OSError as error:
                yield item, Content(extension, 0, None, f"it cannot be read: {error.strerror}")
                continue
            with file:
                yield item, Content(extension, item.size, file)


def count_kinds(files: Iterator[str]) -> dict[str, int]:
    """How many files there are, by extension."""
    return dict(sorted(Counter(map(_extension, files)).items()))


def _check_inner_tables(folder: Path, others: Sequence[str]) -> None:
    """As `datasets` keeps one in the folder of every split; that texts are missing would not be noticed."""
    if inner := sorted({file.rpartition("/")[0] for file in others if file.rpartition("/")[2] in TABLES}):
        commands = "; ".join(f"videoscale pack '{folder / name}' OUTPUT" for name in inner[:3])
        raise ShardError(
            f"{folder} has its captions in {len(inner)} folders in it ({', '.join(inner[:3])}), and none of its own. "
            f"Pack these one by one ({commands}), or name a table for all with --captions of `videoscale pack`."
        )


def _extension(file: str) -> str:
    return Path(file).suffix[1:].lower()


def _item(folder: Path, file: str, key: str, captions: Mapping[str, CaptionRow] | None) -> Item:
    path = folder / file
    caption = caption_beside(path) if captions is None else captions.get(file, CaptionRow("", {}))
    if any("\ud800" <= character <= "\udfff" for character in file):
        raise ShardError(f"The name of {path!r} is not UTF-8; rename it.")
    size, changed = (state.st_size, state.st_mtime_ns) if (state := _stat(path)) else (0, 0)
    return Item(file, key, size, changed, caption)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # a link to nothing, which is left out when it is opened
        return None
