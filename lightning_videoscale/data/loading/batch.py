"""Puts decoded samples together to what the training step receives.

Samples become columns where they are read, and columns become a batch in the process that trains. Between the two lies
the way from a worker, on which latents are as the shard holds them: float16 is half of the float32 that is delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_videoscale.data.loading.texts import with_even_texts
from lightning_videoscale.data.planning.micro_batch import Batch, BatchMeta

MemberColumns = dict[str, Any]
"""Members of B samples by name: one tensor (B, …) where shapes and dtypes agree, else a list of B values."""


def collate(samples: Sequence[dict[str, Any]], sample_ids: list[str], meta: BatchMeta) -> Batch:
    """Puts decoded samples of one shape together.

    Tensors of equal shape and dtype are stacked, anything else becomes a list; a sample that lacks a member which
    another has contributes None. Latents are brought to float32, and embeddings of captions to one length.
    """
    return batch_of(columns_of(samples), sample_ids, meta)


def columns_of(samples: Sequence[dict[str, Any]]) -> MemberColumns:
    """Puts members of the same name together; in a DataLoader's worker right where the other process finds them."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    columns: MemberColumns = {name: [sample.get(name) for sample in samples] for name in names}
    return {name: _stack(column) if _stackable(column) else column for name, column in columns.items()}


def joined(parts: Sequence[MemberColumns], pin: bool = False) -> MemberColumns:
    """Puts the samples of parts below each other as if read at once, in page-locked memory if asked for."""
    if len(parts) == 1:
        return pinned(parts[0]) if pin else parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    sizes = [len(next(iter(part.values()))) for part in parts]
    columns = {name: [part.get(name, [None] * n) for part, n in zip(parts, sizes, strict=True)] for name in names}
    return {
        name: _concatenate(column, pin) if _joinable(column) else [row for rows in column for row in rows]
        for name, column in columns.items()
    }


def pinned(columns: MemberColumns) -> MemberColumns:
    """The same with tensors in page-locked memory, from which GPUs copy faster."""
    return {
        name: column.pin_memory() if isinstance(column, Tensor)
        else [value.pin_memory() if isinstance(value, Tensor) else value for value in column]
        for name, column in columns.items()
    }  # fmt: skip


def batch_of(columns: MemberColumns, sample_ids: list[str], meta: BatchMeta, pin: bool = False) -> Batch:
    """Makes a batch of its columns, see `collate`; with ``pin`` what is made anew is in page-locked memory, too."""
    others = dict(with_even_texts(columns, pin))
    main = "latents" if "latents" in others else "video"
    tensors = others.pop(main)
    if main == "latents":
        tensors = _widened(tensors, pin) if isinstance(tensors, Tensor) else torch.stack([t.float() for t in tensors])
    stacked = {name: column for name, column in others.items() if isinstance(column, Tensor)}
    ragged = {n: column for n, column in others.items() if n not in stacked and any(map(_is_tensor, column))}
    listed = {name: column for name, column in others.items() if name not in stacked and name not in ragged}
    # Lightning takes the batch size for `self.log` from the first tensor that it meets and warns at any other leaf
    # after it: what is no tensor comes before these, and what has other sizes comes last.
    return {"sample_ids": sample_ids, "meta": meta, **listed, main: tensors, **stacked, **ragged}


def _widened(latents: Tensor, pin: bool) -> Tensor:
    if latents.dtype == torch.float32:
        return latents
    return torch.empty(latents.shape, dtype=torch.float32, pin_memory=pin).copy_(latents)


def _stack(tensors: list[Tensor]) -> Tensor:
    if not tensors[0].numel():
        return torch.stack(tensors)  # of nothing, no memory can be shared
    stacked: Tensor = default_collate(tensors)
    return stacked


def _concatenate(tensors: list[Tensor], pin: bool) -> Tensor:
    size = sum(map(len, tensors)), *tensors[0].shape[1:]
    return torch.cat(tensors, out=torch.empty(size, dtype=tensors[0].dtype, pin_memory=pin))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _stackable(column: list[Any]) -> bool:
    return all(map(_is_tensor, column)) and len({(v.shape, v.dtype) for v in column}) == 1


def _joinable(column: list[Any]) -> bool:
    return all(map(_is_tensor, column)) and _stackable([rows[0] for rows in column])
