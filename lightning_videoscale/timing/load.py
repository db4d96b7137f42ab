"""What a micro-batch asks of a rank, read from the ``meta`` that `VideoDataModule` writes into every batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class MicroBatchLoad(NamedTuple):
    """The members of ``batch["meta"]`` that matter here; any object that has the first three will do.

    Attributes:
        samples: B.
        sequence_length: S, tokens of one sample.
        loss_weight: Factor of the micro-batch's mean loss; 0 marks a filler, which repeats samples that count
            elsewhere.
        predicted_cost: Of the planner; 0 where the batch does not say, as are the next three.
        frames: F of the latents, or of the video where the batch holds pixels.
        height: H of them.
        width: W of them.
        has_pixels: 1 where the batch holds a ``video``, else 0.
    """

    samples: int = 0
    sequence_length: int = 0
    loss_weight: float = 0.0
    predicted_cost: float = 0.0
    frames: int = 0
    height: int = 0
    width: int = 0
    has_pixels: int = 0

    @property
    def tokens(self) -> int:
        """B * S."""
        return self.samples * self.sequence_length


def load_of(batch: object) -> MicroBatchLoad | None:
    """Reads a batch; returns None where it is not a mapping, or its ``meta`` lacks the first three members."""
    meta = batch.get("meta") if isinstance(batch, Mapping) else None
    try:
        samples, length, weight = int(meta.samples), int(meta.sequence_length), float(meta.loss_weight)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None
    frames, height, width = (int(getattr(meta, name, 0) or 0) for name in ("frames", "height", "width"))
    cost = float(getattr(meta, "predicted_cost", 0.0) or 0.0)
    return MicroBatchLoad(samples, length, weight, cost, frames, height, width, int("video" in batch))  # type: ignore[operator]
