"""In which order a layer's projections, exchanges and attention run.

`ScheduleName`   the names by which a strategy selects one
`serial`         projections, then the exchange: what `sequence_parallel_attention` does, for every model
`sliced`         messages are slices of the projections' matrix products, on their way while the next one is computed
"""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal["serial", "sliced"]

PENDING: dict[ScheduleName, int] = {"serial": 2, "sliced": 4}
"""Exchanges of a Ulysses group that may be on their way at a time, by schedule."""

__all__ = ["PENDING", "ScheduleName"]
