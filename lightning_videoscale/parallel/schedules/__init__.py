"""In which order a layer's projections, exchanges and attention run.

`ScheduleName`   the names by which a strategy selects one
`"serial"`       projections, then the exchange: what `sequence_parallel_attention` does, for every model
`"sliced"`       messages are slices of matrix products and of attention, each on its way while the next one is computed

`sliced_input`   of "sliced", what is before attention: projections, norms and rotation
`sliced_output`  attention itself and the output projection
`across_heads`   the norm of query and key over all heads, which then are on several ranks
`messages`       the pieces that both send
"""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal["serial", "sliced"]

PENDING: dict[ScheduleName, int] = {"serial": 2, "sliced": 4}
"""Exchanges of a Ulysses group that may be on their way at a time, by schedule."""

__all__ = ["PENDING", "ScheduleName"]
