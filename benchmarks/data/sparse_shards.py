"""Shards of latents of any size that take no room: zeros that are holes in the files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lightning_videoscale.data.planning.shapes import ClipShape

_BLOCK = tarfile.BLOCKSIZE


def write_sparse_shards(folder: Path, shapes: Sequence[ClipShape], shards: int, channels: int = 16) -> str:
    """Writes one sample of float16 latents per shape, in turn over the shards; returns their pattern."""
    headers = {shape: _npy_header(shape, channels) for shape in set(shapes)}
    for number in range(shards):
        with (folder / f"{number:03}.tar").open("wb") as file:
            for key in range(number, len(shapes), shards):
                shape = shapes[key]
                _write_member(file, f"{key:07}.latents.npy", headers[shape], 2 * channels * _cells(shape))
            file.truncate(file.tell() + 2 * _BLOCK)
    return str(folder / f"{{000..{shards - 1:03}}}.tar")


def _write_member(file: BinaryIO, name: str, header: bytes, zeros: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(header) + zeros
    file.write(member.tobuf())
    file.write(header)
    file.seek(file.tell() + zeros + -member.size % _BLOCK)


def _npy_header(shape: ClipShape, channels: int) -> bytes:
    stream = io.BytesIO()
    described = {"descr": "<f2", "fortran_order": False, "shape": (channels, *shape[:3])}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def _cells(shape: ClipShape) -> int:
    return shape.frames * shape.height * shape.width
