"""Bytes of a member to a value: an allow-list of extensions, none of which can run code.

WebDataset's own decoders unpickle ``.pyd``, ``.pkl``, ``.pickle`` and ``.pth``, which runs whatever the shard says;
they are not used.
"""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy

from lightning_videoscale.data.frames import decode_image
from lightning_videoscale.data.media import IMAGE_SUFFIXES
from lightning_videoscale.data.safetensors import main_tensor, read_tensors

PICKLED = frozenset({"pyd", "pkl", "pickle", "pth", "pt"})
"""Formats that run code when they are loaded."""

NPY_HEADER_LIMIT = 16_384
"""More bytes than the header of a `.npy` file of plain numbers can take."""


def suffix(extension: str) -> str:
    """The part that names the format: ``npy`` for ``latents.npy``."""
    return extension.rpartition(".")[2].lower()


def is_decodable(extension: str) -> bool:
    """Whether `decode` knows the format."""
    return suffix(extension) in {"npy", "safetensors", "json", "txt"} | IMAGE_SUFFIXES


def decode(extension: str, data: bytes) -> Any:
    """Decodes one member.

    Returns:
        A tensor for ``npy`` and ``safetensors``, (3, H, W) uint8 for pictures, a str for ``txt``, whatever the document
        holds for ``json``.

    Raises:
        ValueError: If the content is damaged, holds Python objects, or the format is not on the list.
    """
    match suffix(extension):
        case "npy":
            return _decode_npy(data)
        case "safetensors":
            tensors = read_tensors(data)
            return tensors[main_tensor(tensors)]
        case "json":
            return json.loads(data.decode("utf-8"))
        case "txt":
            return data.decode("utf-8")
        case picture if picture in IMAGE_SUFFIXES:
            return decode_image(io.BytesIO(data))
        case other:
            raise ValueError(f"members of the format {other!r} are not decoded (npy, safetensors, json, txt, images)")


def npy_header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Reads the header of a ``.npy`` file.

    Args:
        data: The first bytes of the file, `NPY_HEADER_LIMIT` of them or all.

    Returns:
        Shape, dtype, and the size in bytes that the whole file must have.

    Raises:
        ValueError: If this is no ``.npy`` header, or the array holds Python objects.
    """
    stream = io.BytesIO(data[:NPY_HEADER_LIMIT])
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
    # numpy parses the header as a Python literal and lets that parser's own errors through.
    except Exception as error:
        raise ValueError(f"no .npy header of version 1.0 or 2.0 ({error})") from error
    if dtype.hasobject:
        raise ValueError("the array holds Python objects, which run code when they are loaded; save plain numbers")
    return shape, dtype, stream.tell() + math.prod(shape) * dtype.itemsize


def _decode_npy(data: bytes) -> torch.Tensor:
    _, dtype, size = npy_header(data)
    if size != len(data):
        raise ValueError(f"the array needs {size} bytes and the member has {len(data)}")
    array = npy.read_array(io.BytesIO(data), allow_pickle=False)
    # torch knows neither foreign byte orders nor Fortran order.
    return torch.from_numpy(np.asarray(array, dtype=dtype.newbyteorder("="), order="C"))
