"""A folder of videos and images into WebDataset shards, in pieces that are whole or not there.

The files are cut, in the order of their paths, into pieces of at most so many samples and bytes; piece i becomes the
shard ``i.tar``. ``packed.json`` beside them says of each what it was made of. So a run that was stopped goes on, and a
folder that has changed is packed again only where it has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from lightning_videoscale.data.packing.caption_files import TABLES, Caption, caption_beside, read_captions
from lightning_videoscale.data.packing.manifest import LeftOut, Manifest
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, open_media


@dataclass(frozen=True)
class PackReport:
    """What is in the shards now.

    Attributes:
        shards: The shards, in order.
        written: How many of them this run has made.
        samples: Videos and images in them.
        without_caption: How many of these have none.
        left_out: Files that cannot be opened.
        ignored: How many files of other kinds the folder holds, by extension.
        strangers: What the table of captions names and no file is.
        table: The table that the captions are from; None: texts beside the files.
    """

    shards: tuple[Path, ...]
    written: int
    samples: int
    without_caption: int
    left_out: tuple[LeftOut, ...]
    ignored: Mapping[str, int]
    strangers: tuple[str, ...]
    table: Path | None


class _Item(NamedTuple):
    """A file that becomes a sample."""

    file: str
    key: str
    size: int
    changed: int
    caption: Caption


def pack_folder(
    folder: Path,
    output: Path,
    captions: Path | None = None,
    *,
    file_column: str | None = None,
    caption_column: str | None = None,
    samples_per_shard: int = 1000,
    bytes_per_shard: int = 2**30,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PackReport:
    """Packs the videos and images of a folder, and of the folders in it.

    A sample has the file as it is, ``txt`` with its caption, and ``json`` with ``source``, the file's path from the
    folder, and what else its row of the table says. Each file is opened to see whether it is what it says; from end to
    end `videoscale index` decodes it.

    Args:
        folder: The folder.
        output: Takes the shards. It may be new, empty, or what an earlier run has begun.
        captions: A table of captions; see `read_captions`. None: ``metadata.csv``, ``.jsonl`` or ``.json`` in the
            folder if there is one, else the text file beside each video.
        file_column: See `read_captions`.
        caption_column: See `read_captions`.
        samples_per_shard: Samples of a shard at most.
        bytes_per_shard: Bytes of its videos and images at most; a single larger one has a shard of its own.
        workers: Shards that are written at a time.
        progress: Called with the files that are packed, and how many there are.

    Raises:
        ShardError: If the folder holds nothing to pack, the output something else, or the table is unusable.
        OSError: If a file cannot be read or written; the shards that are complete stay.
        ModuleNotFoundError: If PyAV is not installed.
    """
    paths, ignored = _media(folder, output)
    table = captions or next((file for name in TABLES if (file := folder / name).is_file()), None)
    found = None if table is None else read_captions(table, folder, paths, file_column, caption_column)
    items = [_item(folder, file, key, None if found is None else found.by_file) for file, key in _keys(paths)]
    pieces = list(_pieces(items, samples_per_shard, bytes_per_shard))
    manifest = Manifest(output, [_digest(piece) for piece in pieces])
    missing = [number for number in range(len(pieces)) if number not in manifest.done]
    done = sum(len(pieces[number]) for number in manifest.done)
    progress(done, len(items))
    with ThreadPoolExecutor(workers) as threads:
        writes = {threads.submit(_write, folder, pieces[number], manifest.shard(number)): number for number in missing}
        try:
            for write in as_completed(writes):
                number = writes[write]
                manifest.add(number, write.result())
                done += len(pieces[number])
                progress(done, len(items))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    left_out = tuple(chain.from_iterable(manifest.done[number] for number in range(len(pieces))))
    gone = {file for file, _ in left_out}
    packed = [item for item in items if item.file not in gone]
    return PackReport(
        shards=tuple(manifest.shard(number) for number in range(len(pieces))),
        written=len(missing),
        samples=len(packed),
        without_caption=sum(not item.caption.text for item in packed),
        left_out=left_out,
        ignored=ignored,
        strangers=tuple(() if found is None else found.strangers),
        table=table,
    )


def _media(folder: Path, output: Path) -> tuple[list[str], dict[str, int]]:
    """The paths of videos and images, from the folder; and how many other files there are, by extension."""
    if not folder.is_dir():
        raise ShardError(f"{folder} is no folder of videos and images. The current folder is {Path.cwd()}.")
    seen, files = {output.resolve(), folder.resolve()}, []  # links may lead in circles
    for parent, folders, names in os.walk(folder, followlinks=True):
        inner = {name: (Path(parent) / name).resolve() for name in sorted(folders) if not name.startswith(".")}
        folders[:] = [name for name, path in inner.items() if path not in seen]
        seen |= set(inner.values())
        files += [(Path(parent) / name).relative_to(folder) for name in names if not name.startswith(".")]
    known = VIDEO_SUFFIXES | IMAGE_SUFFIXES
    media = sorted(file.as_posix() for file in files if _extension(file) in known)
    ignored = Counter(_extension(file) for file in files if _extension(file) not in known | {"txt"})
    if not media:
        if ignored["tar"]:
            raise ShardError(f"{folder} holds shards already: videoscale index '{folder}/*.tar'")
        kinds = ", ".join(f"{count} .{kind}" for kind, count in sorted(ignored.items())) or "nothing else"
        raise ShardError(f"{folder} holds no video or image ({' '.join(sorted(known))}); it holds {kinds}.")
    return media, dict(sorted(ignored.items()))


def _extension(file: Path) -> str:
    return file.suffix[1:].lower()


def _keys(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of samples: the path without extension and dots, since a key ends at the first; each only once."""
    taken: set[str] = set()
    for file in files:
        folder, slash, name = file.rpartition("/")
        parts = [part.replace(".", "_") for part in folder.split("/")]
        base = key = "/".join(parts) + slash + name.rpartition(".")[0].replace(".", "_")
        number = 1
        while key in taken:
            number += 1
            key = f"{base}-{number}"
        taken.add(key)
        yield file, key


def _item(folder: Path, file: str, key: str, captions: Mapping[str, Caption] | None) -> _Item:
    path = folder / file
    caption = caption_beside(path) if captions is None else captions.get(file, Caption("", {}))
    if _surrogates(file):
        raise ShardError(f"The name of {path!r} is not UTF-8; rename it.")
    size, changed = (state.st_size, state.st_mtime_ns) if (state := _stat(path)) else (0, 0)
    return _Item(file, key, size, changed, caption)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # a link to nothing, which is left out when it is opened
        return None


def _surrogates(name: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in name)


def _pieces(items: Sequence[_Item], samples: int, size: int) -> Iterator[list[_Item]]:
    piece: list[_Item] = []
    total = 0
    for item in items:
        if piece and (len(piece) == samples or total + item.size > size):
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += item.size
    yield piece


def _digest(piece: Sequence[_Item]) -> str:
    return hashlib.sha256(json.dumps(piece, default=str).encode()).hexdigest()


def _write(folder: Path, piece: Sequence[_Item], shard: Path) -> list[LeftOut]:
    """Writes one shard, which appears under its name when it is complete; returns what was left out."""
    draft = shard.with_name(f".{shard.name}")
    left_out = []
    with draft.open("wb") as stream:
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for item in piece:
                path = folder / item.file
                if reason := _objection(path):
                    left_out.append(LeftOut(item.file, reason))
                else:
                    _add(tar, item, path)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(shard)
    return left_out


def _objection(path: Path) -> str | None:
    """Why a file cannot be used, by its first frame; None if it can."""
    try:
        with path.open("rb") as file, open_media(file) as film:
            first = next(iter(film.frames()), None)
    except MediaError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "it holds no frame" if first is None else None


def _add(tar: tarfile.TarFile, item: _Item, path: Path) -> None:
    member = partial(_member, item.key)
    with path.open("rb") as file:
        tar.addfile(member(path.suffix[1:].lower(), item.size), file)
    fields = json.dumps({**item.caption.fields, "source": item.file}, ensure_ascii=False).encode()
    for extension, content in (("txt", item.caption.text.encode()), ("json", fields)):
        if content:
            tar.addfile(member(extension, len(content)), io.BytesIO(content))


def _member(key: str, extension: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"{key}.{extension}")
    info.size, info.mode = size, 0o444
    return info
