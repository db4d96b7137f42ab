"""Bytes of a member to a value: an allow-list of extensions, none of which can run code.

WebDataset's own decoders unpickle ``.pyd``, ``.pkl``, ``.pickle`` and ``.pth``, which runs whatever the shard says;
they are not used.
"""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from lightning_videoscale.data.shards.frames import decode_image
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES
from lightning_videoscale.data.shards.safetensors import main_tensor, read_tensors

PICKLED = frozenset({"pyd", "pkl", "pickle", "pth", "pt"})
"""Formats that run code when they are loaded."""

NPY_HEADER_LIMIT = 16_384
"""More bytes than the header of a `.npy` file of plain numbers can take."""

_ITEM = re.compile(r"'(\w+)'\s*:\s*('[<>|=]?[a-zA-Z]\d*'|True|False|\([\d\s,L]*\))")
_HEADER = re.compile(rf"\{{\s*{_ITEM.pattern}(?:\s*,\s*{_ITEM.pattern})*\s*,?\s*\}}\s*")


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
            return json.loads(_text(data))
        case "txt":
            return _text(data)
        case picture if picture in IMAGE_SUFFIXES:
            return decode_image(io.BytesIO(data))
        case other:
            raise ValueError(f"members of the format {other!r} are not decoded (npy, safetensors, json, txt, images)")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")  # without the mark that editors on Windows begin a file with
    except UnicodeDecodeError as error:
        raise ValueError(f"{error}; save it as UTF-8") from error


def npy_header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Reads the header of a ``.npy`` file.

    Args:
        data: The first bytes of the file, `NPY_HEADER_LIMIT` of them or all.

    Returns:
        Shape, dtype, and the size in bytes that the whole file must have.

    Raises:
        ValueError: If this is no ``.npy`` header of plain numbers, or the array holds Python objects.
    """
    header = _read_header(data)
    return header.shape, header.dtype, header.end


class _NpyHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    begin: int
    end: int


def _read_header(data: bytes) -> _NpyHeader:
    # Not by numpy, which parses the header as Python: in some releases of Python that fails now and then with threads.
    width = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(data[6:8])
    if data[:6] != b"\x93NUMPY" or width is None:
        raise ValueError("no .npy header")
    begin = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    text = data[8 + width : begin].decode("latin-1")
    fields = dict(_ITEM.findall(text)) if begin <= len(data) and _HEADER.fullmatch(text) else {}
    if fields.keys() != {"descr", "fortran_order", "shape"} or fields["fortran_order"] not in ("True", "False"):
        raise ValueError("no .npy header of plain numbers")
    if fields["descr"].strip("'").endswith("O"):
        raise ValueError("the array holds Python objects, which run code when they are loaded; save plain numbers")
    try:
        dtype = np.dtype(fields["descr"].strip("'"))
        shape = tuple(int(side.strip().rstrip("L")) for side in fields["shape"].strip("()").split(",") if side.strip())
    except (TypeError, ValueError) as error:
        raise ValueError(f"no .npy header of plain numbers ({error})") from error
    if dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise ValueError(
            f"torch has no type for an array of {dtype}: save it as float32, or bfloat16 in a .safetensors, and text "
            "in a .json"
        )
    order: Literal["C", "F"] = "F" if fields["fortran_order"] == "True" else "C"
    return _NpyHeader(shape, dtype, order, begin, begin + math.prod(shape) * dtype.itemsize)


def _decode_npy(data: bytes) -> torch.Tensor:
    header = _read_header(data)
    if header.end != len(data):
        raise ValueError(f"the array needs {header.end} bytes and the member has {len(data)}")
    values = (
        np.frombuffer(data, header.dtype, offset=header.begin)
        if header.end > header.begin
        else np.empty(0, header.dtype)
    )
    array = values.reshape(header.shape, order=header.order)
    # torch knows neither foreign byte orders nor Fortran order, and wants memory of its own.
    return torch.from_numpy(np.array(array, dtype=header.dtype.newbyteorder("="), order="C"))
