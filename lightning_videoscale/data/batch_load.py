"""What callbacks read from any batch: the members of `batch["meta"]` that `VideoDataModule` writes there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class BatchLoad(Protocol):
    """The members of ``meta`` that matter here; any object that has them will do."""

    @property
    def samples(self) -> int:
        """B, the number of samples of the micro-batch."""

    @property
    def sequence_length(self) -> int:
        """S, tokens per sample."""

    @property
    def loss_weight(self) -> float:
        """Factor of the micro-batch's mean loss; 0 marks a filler, which repeats samples that count elsewhere."""


def load_of(batch: object) -> BatchLoad | None:
    """Returns ``batch["meta"]``, or None where the batch is not a mapping or has no complete ``meta``."""
    meta = batch.get("meta") if isinstance(batch, Mapping) else None
    return meta if isinstance(meta, BatchLoad) else None
