"""The table of all samples: shard, key, latent shape, and the byte range of every member.

Planning needs every shape before the first sample is read, so the shards' headers are read once and the table is kept
as a JSON file. A shard that has changed since (size or modification time) is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.data.batch import RESERVED, batch_name
from lightning_videoscale.data.decoding import PICKLED, decode, is_decodable, npy_header, suffix
from lightning_videoscale.data.shards import ByteRange, Members, ShardError, scan_members

_VERSION = 1
_HEADER_BYTES = 16_384
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
    """

    path: Path
    size: int
    mtime_ns: int
    samples: tuple[SampleEntry, ...]

    @classmethod
    def scan(cls, path: Path) -> ShardEntry:
        """Reads names and headers of a tar.

        Raises:
            ShardError: As `scan_members` does, and if a sample lacks a member, holds a pickle, or its latents are not
                a floating-point ``.npy`` array of shape (C, F, H, W).
        """
        stat = path.stat()
        samples = scan_members(path)
        if ignored := Counter(e for members in samples.values() for e in members if not _is_used(path, e)):
            rank_zero_warn(
                f"{path}: members of the formats {dict(ignored)} are left alone; npy, json and txt are decoded."
            )
        with path.open("rb") as file:
            entries = tuple(_describe(path, file.fileno(), key, members) for key, members in samples.items())
        return cls(path, stat.st_size, stat.st_mtime_ns, entries)

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
    def scan(cls, paths: Sequence[Path], known: ShardIndex | None = None) -> ShardIndex:
        """Builds the index of these shards, reading only those that ``known`` does not hold as they are now.

        Shows a progress bar if it takes long.

        Raises:
            ShardError: If a shard cannot be used, or all of them together hold no sample.
        """
        indexed = {shard.path.resolve(): shard for shard in known.shards} if known is not None else {}
        kept = {path: shard for path, shard in indexed.items() if shard.is_current()}
        if changed := [str(path) for path in paths if path.resolve() in indexed.keys() - kept.keys()]:
            rank_zero_info(f"{len(changed)} shards have changed since they were indexed and are read again: {changed}")
        bar = tqdm(
            paths,
            "indexing shards",
            unit="shard",
            delay=_SECONDS_WITHOUT_BAR,
            disable=getattr(rank_zero_only, "rank", 0) != 0,
        )
        index = cls(tuple(kept.get(path.resolve()) or ShardEntry.scan(path) for path in bar))
        if not len(index):
            raise ShardError(f"No samples found: the shards {[str(p) for p in paths]} hold no members.")
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
    def _root(self) -> str:
        return os.path.commonpath([shard.path.resolve().parent for shard in self.shards])

    def shard_of(self, sample: int) -> ShardEntry:
        """The shard that holds sample number ``sample``."""
        return self.shards[int(np.searchsorted(self._starts, sample, side="right")) - 1]

    def sample_id(self, sample: int) -> str:
        """Identity of a sample: its shard's path below the folder that all shards share, and its key."""
        shard = os.path.relpath(self.shard_of(sample).path.resolve(), self._root)
        return f"{shard}/{self.samples[sample].key}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides what a plan reads: shards by name, keys, shapes, byte ranges.

        Folders and modification times are not part of it, so copies of the same shards agree.
        """
        content = [(os.path.relpath(s.path.resolve(), self._root), _shard_to_json(s.path.parent, s)["samples"])
                   for s in self.shards]  # fmt: skip
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def default_index_file(paths: Sequence[Path]) -> Path:
    """Where the index of these shards is kept by default: beside the first shard, under a name made from all of them."""
    folder = paths[0].resolve().parent
    names = json.dumps([os.path.relpath(path.resolve(), folder) for path in paths])
    return folder / f"videoscale-index-{hashlib.sha256(names.encode()).hexdigest()[:8]}.json"


def _is_used(path: Path, extension: str) -> bool:
    if suffix(extension) in PICKLED:
        raise ShardError(
            f"{path}: the member '*.{extension}' is a pickle, which runs code when it is loaded; it is refused. "
            "Write tensors as .npy and fields as .json."
        )
    return is_decodable(extension)


def _describe(path: Path, descriptor: int, key: str, members: Members) -> SampleEntry:
    where = f"{path}: the sample {key!r}"
    way_out = f"Found {sorted(members)}. A sample has a 'latents.npy' and a 'txt' (or a 'text_embeds.npy')."
    if "latents.npy" not in members:
        raise ShardError(f"{where} has no member '{key}.latents.npy'. {way_out}")
    if "txt" not in members and "text_embeds.npy" not in members:
        raise ShardError(f"{where} has no member '{key}.txt'. {way_out}")
    if taken := RESERVED.intersection(batch_name(extension) for extension in members if extension != "txt"):
        raise ShardError(f"{where} has a member named {sorted(taken)}, which a batch uses itself; rename it.")
    shape = _latent_shape(where, descriptor, members["latents.npy"])
    if "json" in members:
        _check_shape_fields(where, os.pread(descriptor, members["json"].size, members["json"].offset), shape)
    return SampleEntry(key, shape, {e: at for e, at in members.items() if is_decodable(e)})


def _latent_shape(where: str, descriptor: int, at: ByteRange) -> LatentShape:
    try:
        shape, dtype, size = npy_header(os.pread(descriptor, min(at.size, _HEADER_BYTES), at.offset))
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
    return {"path": path, "size": shard.size, "mtime_ns": shard.mtime_ns, "samples": samples}


def _shard_from_json(folder: Path, row: dict[str, Any]) -> ShardEntry:
    samples = (
        SampleEntry(key, (c, f, h, w), {extension: ByteRange(*at) for extension, at in members.items()})
        for key, (c, f, h, w), members in row["samples"]
    )
    return ShardEntry(folder / row["path"], row["size"], row["mtime_ns"], tuple(samples))
