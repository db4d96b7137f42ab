"""Puts decoded samples together to what the training step receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_videoscale.data.planning.micro_batch import Batch, BatchMeta


def collate(samples: Sequence[dict[str, Any]], sample_ids: list[str], meta: BatchMeta) -> Batch:
    """Puts decoded samples of one shape together.

    Tensors of equal shape and dtype are stacked, anything else becomes a list; a sample that lacks a member which
    another has contributes None. Latents are brought to float32.

    Args:
        samples: Per sample, its members by name in the batch.
        sample_ids: Their identities.
        meta: The plan's word about them.
    """
    names = dict.fromkeys(name for sample in samples for name in sample)
    columns: dict[str, list[Any]] = {name: [sample.get(name) for sample in samples] for name in names}
    main = "latents" if "latents" in columns else "video"
    tensors = torch.stack([t.float() if main == "latents" else t for t in columns.pop(main)])
    stacked = {name: torch.stack(column) for name, column in columns.items() if _stackable(column)}
    ragged = {name: column for name, column in columns.items() if name not in stacked and _has_tensor(column)}
    listed = {name: column for name, column in columns.items() if name not in stacked and name not in ragged}
    # Lightning takes the batch size for `self.log` from the first tensor that it meets and warns at any other leaf
    # after it: what is no tensor comes before these, and what has other sizes comes last.
    return {"sample_ids": sample_ids, "meta": meta, **listed, main: tensors, **stacked, **ragged}


def _has_tensor(column: list[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in column)


def _stackable(column: list[Any]) -> bool:
    return all(isinstance(v, torch.Tensor) for v in column) and len({(v.shape, v.dtype) for v in column}) == 1
