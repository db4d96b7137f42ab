"""The table of all samples: shard, key, latent shape, and the byte range of every member.

Planning needs every shape before the first sample is read, so the shards' headers are read once and the table is kept
as a JSON file. A shard that has changed since (size or modification time) is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.data.batch import RESERVED, batch_name
from lightning_videoscale.data.decoding import NPY_HEADER_LIMIT, PICKLED, decode, is_decodable, npy_header, suffix
from lightning_videoscale.data.shards import ByteRange, Members, ShardError, scan_members

_VERSION = 1
_SECONDS_WITHOUT_BAR = 2.0

LatentShape = tuple[int, int, int, int]
"""Channels, frames, height and width of a sample's latents."""


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """One sample: its key in the shard, its latent shape, and the members that can be decoded."""

    key: str
    shape: LatentShape
    members: Members


@dataclass(frozen=True)
class ShardEntry:
    """One shard as it was when it was scanned.

    Attributes:
        path: Where it lies.
        size: Bytes of the whole tar.
        mtime_ns: Its modification time in nanoseconds.
        samples: What it holds, in the order of the tar.
        ignored: Extensions that it also holds and that are not decoded, sorted.
    """

    path: Path
    size: int
    mtime_ns: int
    samples: tuple[SampleEntry, ...]
    ignored: tuple[str, ...] = ()

    @classmethod
    def scan(cls, path: Path) -> ShardEntry:
        """Reads names and headers of a tar.

        Raises:
            ShardError: As `scan_members` does, and if a sample lacks a member, holds a pickle, or its latents are not
                a floating-point ``.npy`` array of shape (C, F, H, W).
        """
        stat = path.stat()
        samples = scan_members(path)
        extensions = sorted({extension for members in samples.values() for extension in members})
        if pickles := [extension for extension in extensions if suffix(extension) in PICKLED]:
            member = next(f"{key}.{pickles[0]}" for key, members in samples.items() if pickles[0] in members)
            raise ShardError(
                f"{path}: the member {member!r} is a pickle, which runs code when it is loaded; it is refused. "
                "Write tensors as .npy and fields as .json."
            )
        with path.open("rb") as file:
            entries = tuple(_describe(path, file.fileno(), key, members) for key, members in samples.items())
        ignored = tuple(extension for extension in extensions if not is_decodable(extension))
        return cls(path, stat.st_size, stat.st_mtime_ns, entries, ignored)

    def is_current(self) -> bool:
        """Whether the file still is what was scanned."""
        if not self.path.is_file():
            return False
        stat = self.path.stat()
        return (stat.st_size, stat.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class ShardIndex:
    """All samples of some shards, in a fixed order: sample i is ``samples[i]`` in the shard ``shard_of(i)``."""

    shards: tuple[ShardEntry, ...]

    @classmethod
    def scan(cls, paths: Sequence[Path], known: ShardIndex | None = None, progress: bool = False) -> ShardIndex:
        """Builds the index of these shards.

        Args:
            paths: The shards, in the order that samples are numbered.
            known: An earlier index; of it, shards are read again only if they have changed.
            progress: Whether to show a progress bar if it takes long.

        Raises:
            ShardError: If a shard cannot be used, all of them together hold no sample, or the latents' channels differ.
        """
        indexed = {shard.path.resolve(): shard for shard in known.shards} if known is not None else {}
        kept = {path: shard for path, shard in indexed.items() if shard.is_current()}
        bar = tqdm(
            paths, "indexing shards", unit="shard", delay=_SECONDS_WITHOUT_BAR, disable=not progress, leave=False
        )
        index = cls(tuple(kept.get(path.resolve()) or ShardEntry.scan(path) for path in bar))
        if not len(index):
            raise ShardError(f"No samples found: the shards {[str(p) for p in paths]} hold no members.")
        index._check_channels()
        return index

    @classmethod
    def load(cls, file: Path) -> ShardIndex:
        """Reads what `save` wrote.

        Raises:
            ShardError: If the file is no index, or one of another version.
        """
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
            if table["version"] != _VERSION:
                raise ValueError(f"it has version {table['version']}, this release reads {_VERSION}")
            return cls(tuple(_shard_from_json(file.parent, row) for row in table["shards"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{file} is not a shard index ({error}); delete it and it is built again.") from error

    def save(self, file: Path) -> None:
        """Writes the index as JSON, with paths relative to the file, so that both can move together."""
        table = {"version": _VERSION, "shards": [_shard_to_json(file.parent, shard) for shard in self.shards]}
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several nodes may write the same content to a shared folder: each replaces the file in one move.
        draft = file.with_name(f"{file.name}.{os.uname().nodename}.{os.getpid()}")
        draft.write_text(json.dumps(table, separators=(",", ":")), encoding="utf-8")
        draft.replace(file)

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def samples(self) -> tuple[SampleEntry, ...]:
        """All samples."""
        return tuple(sample for shard in self.shards for sample in shard.samples)

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.cumsum([0] + [len(shard.samples) for shard in self.shards])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The shards' paths below the folder that all share."""
        paths = [shard.path.resolve() for shard in self.shards]
        root = os.path.commonpath([path.parent for path in paths])
        return tuple(os.path.relpath(path, root) for path in paths)

    def _shard_number(self, sample: int) -> int:
        return int(np.searchsorted(self._starts, sample, side="right")) - 1

    def _check_channels(self) -> None:
        first_with = {sample.shape[0]: i for i, sample in reversed(list(enumerate(self.samples)))}
        if len(first_with) > 1:
            found = ", ".join(f"{channels} in {self.sample_id(i)}" for channels, i in first_with.items())
            raise ShardError(f"The latents have different numbers of channels: {found}. One model takes one number.")

    def shard_of(self, sample: int) -> ShardEntry:
        """The shard that holds sample number ``sample``."""
        return self.shards[self._shard_number(sample)]

    def sample_id(self, sample: int) -> str:
        """Identity of a sample: its shard's path below the folder that all shards share, and its key."""
        return f"{self._names[self._shard_number(sample)]}/{self.samples[sample].key}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides what a plan reads: shards by name, keys, shapes, byte ranges.

        Folders and modification times are not part of it, so copies of the same shards agree.
        """
        rows = (_shard_to_json(shard.path.parent, shard)["samples"] for shard in self.shards)
        content = list(zip(self._names, rows, strict=True))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def default_index_file(paths: Sequence[Path]) -> Path:
    """Where the index of these shards is kept by default: beside the first one, under a name made from all of them."""
    folder = paths[0].resolve().parent
    names = json.dumps([os.path.relpath(path.resolve(), folder) for path in paths])
    return folder / f"videoscale-index-{hashlib.sha256(names.encode()).hexdigest()[:8]}.json"


def _describe(path: Path, descriptor: int, key: str, members: Members) -> SampleEntry:
    where = f"{path}: the sample {key!r}"
    way_out = f"Found {sorted(members)}. A sample has a 'latents.npy' and a 'txt' (or a 'text_embeds.npy')."
    if "latents.npy" not in members:
        raise ShardError(f"{where} has no member {key + '.latents.npy'!r}. {way_out}")
    if "txt" not in members and "text_embeds.npy" not in members:
        raise ShardError(f"{where} has no member {key + '.txt'!r}. {way_out}")
    if taken := RESERVED.intersection(batch_name(extension) for extension in members if extension != "txt"):
        raise ShardError(f"{where} has a member named {sorted(taken)}, which a batch uses itself; rename it.")
    shape = _latent_shape(where, descriptor, members["latents.npy"])
    if "json" in members:
        _check_shape_fields(where, os.pread(descriptor, members["json"].size, members["json"].offset), shape)
    return SampleEntry(key, shape, {e: at for e, at in members.items() if is_decodable(e)})


def _latent_shape(where: str, descriptor: int, at: ByteRange) -> LatentShape:
    try:
        shape, dtype, size = npy_header(os.pread(descriptor, min(at.size, NPY_HEADER_LIMIT), at.offset))
    except ValueError as error:
        raise ShardError(f"{where} has latents that cannot be read: {error}.") from error
    if len(shape) != 4 or min(shape) < 1 or dtype.kind != "f" or size != at.size:
        raise ShardError(
            f"{where} has latents of shape {shape}, {dtype}, {at.size} of {size} bytes; "
            "they must be a whole (C, F, H, W) array of float16 or float32."
        )
    channels, frames, height, width = shape
    return channels, frames, height, width


def _check_shape_fields(where: str, content: bytes, shape: LatentShape) -> None:
    try:
        fields = decode("json", content)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{where} has a .json that cannot be read: {error}.") from error
    if not isinstance(fields, dict):
        raise ShardError(f"{where} has a .json that holds a {type(fields).__name__}; it must hold an object.")
    stated = {name: fields[name] for name in ("frames", "height", "width") if name in fields}
    actual = dict(zip(("frames", "height", "width"), shape[1:], strict=True))
    if wrong := {name: value for name, value in stated.items() if value != actual[name]}:
        raise ShardError(
            f"{where} says {wrong} in its .json and its latents are {actual}; "
            "the .json describes the latents, keep the pixels' shape under other names."
        )


def _shard_to_json(folder: Path, shard: ShardEntry) -> dict[str, Any]:
    samples = [[s.key, s.shape, {e: list(at) for e, at in s.members.items()}] for s in shard.samples]
    path = os.path.relpath(shard.path.resolve(), folder.resolve())
    return {"path": path, "size": shard.size, "mtime_ns": shard.mtime_ns, "samples": samples, "ignored": shard.ignored}


def _shard_from_json(folder: Path, row: dict[str, Any]) -> ShardEntry:
    samples = (
        SampleEntry(key, (c, f, h, w), {extension: ByteRange(*at) for extension, at in members.items()})
        for key, (c, f, h, w), members in row["samples"]
    )
    path = Path(os.path.normpath(folder / row["path"]))
    return ShardEntry(path, row["size"], row["mtime_ns"], tuple(samples), tuple(row["ignored"]))
