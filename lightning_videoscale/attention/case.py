"""What a kernel must know of a call of attention, and what two calls have in common that take as long.

Shapes: B batch, H heads, S queries, K keys, D head dim.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MANY_ROWS = 64
"""As many heads of samples fill every GPU at the lengths that are measured: more take as long, each."""


class AttentionKey(NamedTuple):
    """What calls share that one measurement stands for; of plain values, as it is written to a file.

    Attributes:
        device: Such as "NVIDIA H200", or "cpu".
        dtype: Such as "bfloat16".
        head_dim: D.
        rows: Heads of all samples together, B · H, at most 64.
        queries: Class of the number of queries, see `length_class`.
        keys: Likewise of keys.
        masked: Whether keys are masked.
        with_lse: Whether the log-sum-exp is needed, as by ring attention.
        deterministic: Whether only kernels may run that give the same bits every time.
    """

    device: str
    dtype: str
    head_dim: int
    rows: int
    queries: int
    keys: int
    masked: bool
    with_lse: bool
    deterministic: bool

    def __str__(self) -> str:
        """Such as "bfloat16, D = 128, 12 heads, 32768 queries, 32768 keys, for a ring"."""
        marks = [", masked"] * self.masked + [", for a ring"] * self.with_lse
        marks += [", deterministic"] * self.deterministic
        heads = f"{self.rows} heads" if self.rows < _MANY_ROWS else f"{_MANY_ROWS} or more heads"
        queries, keys = length_of(self.queries), length_of(self.keys)
        return f"{self.dtype}, D = {self.head_dim}, {heads}, {queries} queries, {keys} keys{''.join(marks)}"

    def distance(self, other: AttentionKey) -> float | None:
        """How far another key is away, in octaves of lengths and heads; None where kernels differ in kind."""
        kinds = [
            (key.device, key.dtype, key.head_dim, key.masked, key.with_lse, key.deterministic) for key in (self, other)
        ]
        if kinds[0] != kinds[1]:
            return None
        lengths = abs(self.queries - other.queries) + abs(self.keys - other.keys)
        return lengths / 2 + abs(math.log2(self.rows / other.rows))


@dataclass(frozen=True)
class AttentionCase:
    """The facts of one call by which a kernel can run it or not: ``rows`` is B · H, ``queries`` S, ``keys`` K."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    rows: int
    queries: int
    keys: int
    masked: bool
    with_lse: bool
    deterministic: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, *, masked: bool, with_lse: bool) -> AttentionCase:
        """Returns the facts of a call with a query (B, H, S, D) and a key (B, H, K, D)."""
        batch, heads, queries, head_dim = query.shape
        return cls(
            query.device,
            query.dtype,
            head_dim,
            batch * heads,
            queries,
            key.shape[2],
            masked,
            with_lse,
            torch.are_deterministic_algorithms_enabled(),
        )

    @property
    def key(self) -> AttentionKey:
        """What one measurement stands for."""
        return AttentionKey(
            device_name(self.device),
            str(self.dtype).removeprefix("torch."),
            self.head_dim,
            min(self.rows, _MANY_ROWS),
            length_class(self.queries),
            length_class(self.keys),
            self.masked,
            self.with_lse,
            self.deterministic,
        )


def case_of(key: AttentionKey, device: torch.device) -> AttentionCase:
    """Returns a call that a key stands for: one sample, at the middle of the classes of length."""
    return AttentionCase(
        device,
        getattr(torch, key.dtype),
        key.head_dim,
        key.rows,
        length_of(key.queries),
        length_of(key.keys),
        key.masked,
        key.with_lse,
        key.deterministic,
    )


def length_class(tokens: int) -> int:
    """Returns in which half octave a length is: 30 for all from 27555 to 38967."""
    return round(2 * math.log2(tokens))


def length_of(length_class: int) -> int:
    """Returns the length in the middle of a class: 32768 for 30."""
    return round(2 ** (length_class / 2))


@functools.cache
def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H200", or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
