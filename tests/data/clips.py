"""Small shards for tests, written as users write theirs: with webdataset.TarWriter."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

from lightning_videoscale.data.shards.patterns import Patterns, expand_each

# Channels, frames, height, width; with patches of (1, 2, 2) these are 4, 16, 48 and 80 tokens.
SHAPES = [(4, 1, 4, 4), (4, 1, 8, 8), (4, 3, 8, 8), (4, 5, 8, 8)]


def npy(array: np.ndarray[Any, Any], allow_pickle: bool = False) -> bytes:
    """The bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def clip(number: int, shape: tuple[int, ...] = (4, 3, 8, 8), **members: bytes) -> dict[str, Any]:
    """Sample ``number``: every element of its latents is ``number``. Further members by extension, ``_`` for ``.``."""
    _, frames, height, width = shape
    fields = {"frames": frames, "height": height, "width": width, "fps": 24}
    extra = {extension.replace("_", "."): content for extension, content in members.items()}
    return {
        "__key__": f"clip{number:05}",
        "latents.npy": npy(np.full(shape, number, dtype=np.float16)),
        "txt": f"a caption, n° {number}".encode(),
        "json": json.dumps(fields).encode(),
    } | extra


def write_shard(path: Path, samples: Sequence[Mapping[str, Any]]) -> Path:
    """Writes samples into a tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wds.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path


def expand_shards(shards: Patterns) -> list[str]:
    """The shards of all patterns, in order."""
    return [shard for shards in expand_each(shards) for shard in shards]


def write_shards(folder: Path, samples: int, shards: int = 2) -> str:
    """Writes ``samples`` clips of four shapes, unequally often, into ``shards`` tars; returns the pattern."""
    draw = np.random.default_rng(0)
    clips = [clip(i, SHAPES[draw.choice(4, p=[0.4, 0.3, 0.2, 0.1])]) for i in range(samples)]
    for number in range(shards):
        write_shard(folder / f"{number:03}.tar", clips[number::shards])
    return str(folder / f"{{000..{shards - 1:03}}}.tar")
