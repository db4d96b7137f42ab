"""Embeddings of captions of different lengths, brought to one length for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_even_texts(columns: dict[str, Any], pin: bool = False) -> dict[str, Any]:
    """Fills up ``text_embeds`` (n, D) of B samples with zeros to (B, L, D), and their ``text_mask`` to (B, L).

    Where a sample has no mask, all its rows are its caption's. Embeddings of another kind (one vector, of unequal width
    or dtype, or missing in a sample) stay as they are.

    Args:
        columns: Members of the samples by name, see `MemberColumns`.
        pin: Whether what is filled up is in page-locked memory.
    """
    embeds = columns.get("text_embeds")
    if embeds is None or not _are_alike(embeds, dims=2):
        return columns
    masks = columns.get("text_mask")
    if not isinstance(masks, Tensor):
        own = masks or [None] * len(embeds)
        kind = next((mask.dtype for mask in own if isinstance(mask, Tensor)), torch.bool)
        masks = [torch.ones(len(e), dtype=kind) if m is None else m for e, m in zip(embeds, own, strict=True)]
    if not _are_alike(masks, dims=1):
        return columns
    length = max(map(len, (*embeds, *masks)))
    return columns | {"text_embeds": _filled(embeds, length, pin), "text_mask": _filled(masks, length, pin)}


def _are_alike(values: Sequence[Any] | Tensor, dims: int) -> bool:
    """Whether these are tensors of so many dims, of which only the first may differ in size."""
    are_tensors = all(isinstance(value, Tensor) and value.ndim == dims for value in values)
    return are_tensors and len({(value.shape[1:], value.dtype) for value in values}) == 1


def _filled(rows: Sequence[Tensor] | Tensor, length: int, pin: bool) -> Tensor:
    if isinstance(rows, Tensor) and rows.shape[1] == length:
        return rows
    filled = torch.zeros(len(rows), length, *rows[0].shape[1:], dtype=rows[0].dtype, pin_memory=pin)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return filled
