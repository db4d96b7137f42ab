"""What the training step receives: the batch, and the plan's word about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Batch = dict[str, Any]
"""``sample_ids`` (list[str]), ``meta`` (`BatchMeta`), ``caption`` (list[str]), ``latents`` (B, C, F, H, W) float32 or
``video`` (B, 3, F, H, W) uint8, and every other member of the samples under its name without the format: ``mask.npy``
becomes ``mask``.

Where a member's tensors differ in shape they stay a list; Lightning then finds the batch size ambiguous, and
``self.log(..., batch_size=batch["meta"].samples)`` says it."""

RESERVED = frozenset({"sample_ids", "meta", "caption"})
"""Names in a batch that no member may take."""


class BatchMeta(NamedTuple):
    """What the plan says about one micro-batch.

    A named tuple, so that it passes unchanged through worker processes, pinning and Lightning's transfer to the device.

    Attributes:
        frames: Frames F of the latents, or of the video where the shards hold pixels.
        height: Height H of them.
        width: Width W of them.
        sequence_length: Tokens S of one sample after VAE and patches, text included where the model attends jointly.
        samples: Batch size B.
        predicted_cost: Seconds, where a step-time model is known; else B * S^p.
        loss_weight: What the mean-over-batch loss must be multiplied with, so that the mean over ranks and
            accumulated micro-batches is the mean over all samples (or tokens) of the step; with
            ``loss_normalization="epoch"``, so that the mean over the steps too is that over the epoch. 0 for a batch
            that only fills a gap.
        cost_version: Names the step-time model that predicted the cost; empty where there is none.
    """

    frames: int
    height: int
    width: int
    sequence_length: int
    samples: int
    predicted_cost: float
    loss_weight: float
    cost_version: str = ""


def batch_name(extension: str) -> str:
    """Name of a member in the batch: ``txt`` is ``caption``, ``latents.npy`` is ``latents``, ``json`` is ``json``."""
    return "caption" if extension == "txt" else extension.rpartition(".")[0] or extension


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
