"""Tensors from the safetensors format: a length, a JSON header, and plain numbers. Nothing in it can run.

The header alone says every shape, so that a shard can be indexed without reading its latents. The library safetensors
reads whole files only; behind a header that is checked here, reading the tensors takes no more than it does.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch

HEADER_LIMIT = 2**20
"""More bytes than the header of a sample's few tensors takes."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """One tensor of a file: its type, its shape, and where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: bytes, size: int) -> dict[str, TensorEntry]:
    """Reads what a file of ``size`` bytes holds, by its first `HEADER_LIMIT` bytes.

    Raises:
        ValueError: If this is no safetensors file, or is damaged.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > HEADER_LIMIT - 8 or 8 + length > len(data):
        raise ValueError("no safetensors header")
    try:
        table = json.loads(data[8 : 8 + length].decode("utf-8"))
        return {name: _entry(row, 8 + length, size) for name, row in table.items() if name != "__metadata__"}
    except (AttributeError, KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no safetensors header ({type(error).__name__}: {error})") from error


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Reads all tensors of a file.

    Raises:
        ValueError: As `read_header` does.
    """
    content = bytearray(data)  # torch wants writable memory of its own
    return {
        name: torch.frombuffer(content, dtype=at.dtype, count=math.prod(at.shape), offset=at.begin).view(at.shape)
        if at.end > at.begin
        else torch.empty(at.shape, dtype=at.dtype)
        for name, at in read_header(data[:HEADER_LIMIT], len(data)).items()
    }


def main_tensor(names: Any) -> str:
    """Which of the tensors of a ``.safetensors`` member is the member's value: ``latents``, or the only one.

    Raises:
        ValueError: If there are several and none is called so.
    """
    names = list(names)
    if "latents" in names or len(names) == 1:
        return "latents" if "latents" in names else names[0]
    raise ValueError(f"the file holds the tensors {names}; name one of them 'latents', or keep one tensor per member")


def _entry(row: dict[str, Any], start: int, size: int) -> TensorEntry:
    if row["dtype"] not in _DTYPES:
        raise ValueError(f"tensors of the type {row['dtype']!r} are not read (known are {', '.join(_DTYPES)})")
    dtype, shape = _DTYPES[row["dtype"]], tuple(row["shape"])
    begin, end = row["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"a tensor has the shape {shape} and the range {begin}:{end}")
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
        raise ValueError(f"a tensor of shape {shape} lies at bytes {begin}:{end} of {size - start}")
    return TensorEntry(dtype, shape, start + begin, start + end)
