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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.data.packing.items import Content, Item, Source
from lightning_videoscale.data.packing.manifest import LeftOutFile, Manifest
from lightning_videoscale.data.packing.media_files import MediaFiles, count_kinds, list_folder
from lightning_videoscale.data.packing.parquet_rows import ParquetRows
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
        captions_from: Where the captions are from, in words.
    """

    shards: tuple[Path, ...]
    written: int
    samples: int
    without_caption: int
    left_out: tuple[LeftOutFile, ...]
    ignored: Mapping[str, int]
    strangers: tuple[str, ...]
    captions_from: str

    @property
    def captioned(self) -> str:
        """What to say of the captions."""
        said = f"captions from {self.captions_from}: {self.without_caption} samples have none"
        if 0 < self.samples == self.without_caption:
            said += "; --captions FILE, in Python captions=, names a table of them"
        return said


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
    progress: bool = False,
) -> PackReport:
    """Packs the videos and images of a folder, and of the folders in it; or those in the rows of its Parquet files.

    A sample has the file as it is, ``txt`` with its caption, and ``json`` with ``source``, the file's path from the
    folder, and what else its row of the table says. Each file is opened to see whether it is what it says; from end to
    end `videoscale index` decodes it.

    Args:
        folder: The folder.
        output: Takes the shards. It may be new, empty, or what an earlier run has begun.
        captions: A table of captions; see `read_captions`. None: ``metadata.csv``, ``.jsonl``, ``.json`` or
            ``.parquet`` in the folder if there is one, else the text file beside each video.
        file_column: See `read_captions`.
        caption_column: See `read_captions`.
        samples_per_shard: Samples of a shard at most.
        bytes_per_shard: Bytes of its videos and images at most; a single larger one has a shard of its own.
        workers: Shards that are written at a time.
        progress: Whether to show a progress bar, by files.

    Raises:
        ShardError: If the folder holds nothing to pack, the output something else, or the table is unusable.
        OSError: If a file cannot be read or written; the shards that are complete stay.
        ModuleNotFoundError: If PyAV is not installed, or pyarrow where there is Parquet.
    """
    source, captions_from, strangers = _source(folder, output, captions, file_column, caption_column)
    pieces = source.pieces(samples_per_shard, bytes_per_shard)
    manifest = Manifest(output, [_digest(piece) for piece in pieces])
    missing = [number for number in range(len(pieces)) if number not in manifest.done]
    done, total = sum(len(pieces[number]) for number in manifest.done), sum(map(len, pieces))
    bar = tqdm(desc="packing", total=total, initial=done, unit=" files", disable=not (progress and missing))
    with bar, ThreadPoolExecutor(workers) as threads:
        writes = {threads.submit(_write, source, pieces[n], manifest.shard(n), bar): n for n in missing}
        try:
            for write in as_completed(writes):
                manifest.add(writes[write], write.result())
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    left_out = tuple(chain.from_iterable(manifest.done[number] for number in range(len(pieces))))
    gone = {file for file, _ in left_out}
    packed = [item for item in chain.from_iterable(pieces) if item.name not in gone]
    return PackReport(
        shards=tuple(manifest.shard(number) for number in range(len(pieces))),
        written=len(missing),
        samples=len(packed),
        without_caption=sum(not item.caption.text for item in packed),
        left_out=left_out,
        ignored=source.ignored,
        strangers=strangers,
        captions_from=captions_from,
    )


def _source(
    folder: Path, output: Path, captions: Path | None, file_column: str | None, caption_column: str | None
) -> tuple[Source, str, tuple[str, ...]]:
    """What the folder holds; where its captions are from, in words; and what their table names and no file is."""
    listing = list_folder(folder, output)
    if listing.media:
        files = MediaFiles(folder, listing, captions, file_column, caption_column)
        return files, "the texts beside the files" if files.table is None else str(files.table), files.strangers
    if tars := listing.of_kind("tar"):
        parent = (folder / tars[0]).parent
        raise ShardError(f"{folder} holds shards already: videoscale index '{parent}/*.tar'")
    if listing.of_kind("arrow"):
        raise ShardError(
            f"{folder} holds Arrow files, as `save_to_disk` of datasets writes them. Write Parquet instead, and pack "
            f"that: datasets.load_from_disk('{folder}').to_parquet('FOLDER/data.parquet')"
        )
    if listing.of_kind("parquet"):
        if captions is not None or file_column is not None:
            raise ShardError(
                f"{folder} holds Parquet files, whose rows have their captions in a column (--caption-column): leave "
                "out --captions and --file-column."
            )
        return ParquetRows(folder, listing, caption_column), "the rows of the Parquet files", ()
    kinds = ", ".join(f"{count} .{kind}" for kind, count in count_kinds(iter(listing.others)).items()) or "nothing else"
    known = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
    raise ShardError(f"{folder} holds no video or image ({known}); it holds {kinds}.")


def _digest(piece: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps(piece, default=str).encode()).hexdigest()


def _write(source: Source, piece: Sequence[Item], shard: Path, bar: tqdm) -> list[LeftOutFile]:
    """Writes one shard, which appears under its name when it is complete; returns what was left out."""
    draft = shard.with_name(f".{shard.name}")
    left_out = []
    with draft.open("wb") as stream:
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for item, content in source.contents(piece):
                if reason := content.objection or _objection(content):
                    left_out.append(LeftOutFile(item.name, reason))
                else:
                    _add(tar, item, content)
                with bar.get_lock():
                    bar.update()
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(shard)
    return left_out


def _objection(content: Content) -> str | None:
    """Why a file cannot be used, by its first frame; None if it can."""
    assert content.stream is not None
    try:
        with open_media(content.stream) as film:
            first = next(iter(film.frames()), None)
    except MediaError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    content.stream.seek(0)
    return "it holds no frame" if first is None else None


def _add(tar: tarfile.TarFile, item: Item, content: Content) -> None:
    member = partial(_member, item.key)
    tar.addfile(member(content.extension, content.size), content.stream)
    fields = json.dumps({**item.caption.fields, "source": item.name}, ensure_ascii=False, default=str).encode()
    for extension, beside in (("txt", item.caption.text.encode()), ("json", fields)):
        if beside:
            tar.addfile(member(extension, len(beside)), io.BytesIO(beside))


def _member(key: str, extension: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"{key}.{extension}")
    info.size, info.mode = size, 0o444
    return info
