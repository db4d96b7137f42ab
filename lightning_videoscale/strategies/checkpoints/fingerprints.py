"""Fingerprints of tensors: 64 bits that tell whether a model holds the values that another run trained on.

A fingerprint is a sum over the tensor's bytes, eight at a time, each times an odd number that is mixed from its place.
Two tensors that differ in eight aligned bytes alone never have the same. Otherwise the chance is about 2^-64, unless
somebody looks for such a pair: this is no signature. It takes two passes over the tensor, and does not depend on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.trees import is_wrapper, plain_tensors

_WORD = 8  # bytes
_ROW = 1 << 14  # words, which share their weights with those of other rows; a row has one of its own
_ROWS_AT_A_TIME = {"cpu": 4}  # what the caches hold
_ROWS_ON_DEVICES = 256  # which bounds what a fingerprint takes of the device's memory


@dataclass(frozen=True)
class Fingerprint:
    """What a checkpoint keeps of a tensor that it leaves out.

    Attributes:
        shape: Of the whole tensor.
        dtype: Its name, such as ``"torch.bfloat16"``, or the class of a tensor that consists of others.
        bits: Of its bytes.
        rounded: Of its values in bfloat16, by which tensors are compared that are held in different floating dtypes;
            None for others.
    """

    shape: tuple[int, ...]
    dtype: str
    bits: int
    rounded: int | None

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Fingerprint:
        """Returns the fingerprint of a whole tensor; parts of it are moved to ``device``, which computes."""
        if is_wrapper(values):  # as quantized weights are, of numbers, their scales and more
            parts = [_weighted_sum(part, part.dtype, device) for part in plain_tensors(values)]
            bits = sum((2 * place + 1) * part for place, part in enumerate(parts)) % 2**64
            return cls(tuple(values.shape), type(values).__name__, bits, None)
        return cls(
            tuple(values.shape),
            str(values.dtype),
            _weighted_sum(values, values.dtype, device),
            _weighted_sum(values, torch.bfloat16, device) if values.is_floating_point() else None,
        )

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Fingerprint:
        """Returns what `to_dict` was called on."""
        return cls(tuple(saved["shape"]), saved["dtype"], saved["bits"], saved["rounded"])

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers, strings and a list only, which a checkpoint can hold."""
        return asdict(self) | {"shape": list(self.shape)}

    def difference(self, other: Fingerprint) -> str | None:
        """Returns how a tensor differs from the one that it should be, ``other``; None if it does not."""
        if self.shape != other.shape:
            return f"has shape {list(self.shape)} and had {list(other.shape)}"
        if self.dtype == other.dtype:
            return None if self.bits == other.bits else "has other values"
        if self.rounded is not None and self.rounded == other.rounded:
            return None
        return f"has other values, or lost them in its dtype ({self.dtype}, then {other.dtype})"


@torch.no_grad()
def _weighted_sum(values: Tensor, dtype: torch.dtype, device: torch.device) -> int:
    """The sum over words of eight bytes of the values in a dtype, modulo 2^64."""
    weights, total = _odd_numbers(0, _ROW, device), 0
    rows_at_a_time = _ROWS_AT_A_TIME.get(device.type, _ROWS_ON_DEVICES)
    for index, chunk in enumerate(values.flatten().split(rows_at_a_time * _ROW * _WORD // dtype.itemsize)):
        data = chunk.to(device, dtype).contiguous().view(torch.uint8)
        words = torch.nn.functional.pad(data, (0, -data.numel() % (_ROW * _WORD))).view(torch.int64).view(-1, _ROW)
        of_rows = _odd_numbers(index * rows_at_a_time, len(words), device)
        total += int(((words * weights).sum(1) * of_rows).sum().item())
    return total % 2**64


def _odd_numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Numbers mixed from their places, by the finalizer of splitmix64 with signed shifts."""
    mixed = torch.arange(first + 1, first + 1 + count, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) | 1
