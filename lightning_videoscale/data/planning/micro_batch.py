"""A micro-batch: as it is planned, what the plan says about it, and as the training step receives it."""

from __future__ import annotations

from typing import Any, NamedTuple

Batch = dict[str, Any]
"""``sample_ids`` (list[str]), ``meta`` (`BatchMeta`), ``caption`` (list[str]), ``latents`` (B, C, F, H, W) float32 or
``video`` (B, 3, F, H, W) uint8, and every other member of the samples under its name without the format: ``mask.npy``
becomes ``mask``.

``text_embeds`` are (B, L, D), zero behind a caption's end, and ``text_mask`` (B, L) says where that is. Where another
member's tensors differ in shape they stay a list; Lightning then finds the batch size ambiguous, and
``self.log(..., batch_size=batch["meta"].samples)`` says it."""


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


class MicroBatch(NamedTuple):
    """What one rank reads at once: rows of the table, all of one shape, and the plan's word about them.

    Attributes:
        samples: The rows.
        meta: Shape, batch size, cost and weight.
        starts: Per sample, second of the clip at which reading begins.
    """

    samples: tuple[int, ...]
    meta: BatchMeta
    starts: tuple[float, ...] = ()
