"""What becomes a sample: a file of a folder, or a row of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from lightning_videoscale.data.packing.caption_files import CaptionRow
from lightning_videoscale.data.shards.tars import own_key


class Item(NamedTuple):
    """A video or an image to pack.

    Attributes:
        name: The file's path from the folder; of a row ``00000.parquet#12``.
        key: Name of its sample.
        size: Its bytes; of a row about as many.
        changed: When its file was changed.
        caption: Its caption, and fields.
    """

    name: str
    key: str
    size: int
    changed: int
    caption: CaptionRow


class Content(NamedTuple):
    """An item's bytes: a stream, or why there are none.

    Attributes:
        extension: Its extension in the shard.
        size: Its bytes.
        stream: Seekable; None where it cannot be read.
        objection: Why it cannot be read.
    """

    extension: str
    size: int
    stream: BinaryIO | None
    objection: str = ""


class Source(Protocol):
    """A folder that is packed."""

    ignored: Mapping[str, int]

    def pieces(self, samples: int, size: int) -> list[list[Item]]:
        """Cuts the items into pieces of at most so many samples and bytes, if more than one is in a piece."""

    def contents(self, piece: Sequence[Item]) -> Iterator[tuple[Item, Content]]:
        """Opens the items of a piece one after the other; a stream is closed when the next one is asked for."""


def plain_key(path: str) -> str:
    """A name of a sample: without dots, as a key ends at the first, and none that WebDataset takes for bookkeeping."""
    return own_key(path.replace(".", "_"))


def unique_keys(paths: Sequence[str]) -> Iterator[str]:
    """Names of samples: the path without extension, as a `plain_key`; each only once."""
    taken: set[str] = set()
    for path in paths:
        base = key = plain_key(path.rpartition(".")[0])
        number = 1
        while key in taken:
            number += 1
            key = f"{base}-{number}"
        taken.add(key)
        yield key


def cut_pieces(items: Sequence[Item], samples: int, size: int) -> Iterator[list[Item]]:
    """See `Source.pieces`."""
    piece: list[Item] = []
    total = 0
    for item in items:
        if piece and (len(piece) == samples or total + item.size > size):
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += item.size
    if piece:
        yield piece
