"""In which order a layer's projections, exchanges and attention run.

`ScheduleName`   the names of those that there are
`"serial"`       projections, then the exchange: what `sequence_parallel_attention` does, for every model
`"overlap"`      each projection's message is on its way while the next projection is computed (async Ulysses)
`"sliced"`       messages are slices of matrix products and of attention, each on its way while the next one is computed

`ScheduleSetting`  what a user may ask for: one of them, or ``"auto"``, which chooses for each kind of layer
`table`            what is chosen, as layers ask for it
`choices`          how it is chosen: by what was measured, agreed by all ranks
`trial`            how a layer is measured, under each schedule
`trial_layer`      that layer
`prediction`       the same by bytes and operations, where nothing was measured
`records`          measurements, and the file in which they are kept

`input_projections`  of "overlap" and "sliced", what is before attention: projections, norms and rotation
`attention_output`   of "sliced", attention itself; of both, the output projection
`projecting`         what the former computes, `attending` what the latter does
`projection_op`      the one as an op, by which compiled code calls it, see `ops`
`output_ops`         the other
`across_heads`       the norm of query and key over all heads, which then are on several ranks
`messages`           the pieces that both send
"""

from __future__ import annotations

from typing import Literal

ScheduleName = Literal["serial", "overlap", "sliced"]
ScheduleSetting = Literal["auto", "serial", "overlap", "sliced"]

HIDING: tuple[ScheduleName, ...] = ("overlap", "sliced")
"""Those that hide exchanges, whose exchanges are one code."""

PENDING: dict[ScheduleSetting, int] = {"auto": 4, "serial": 2, "overlap": 4, "sliced": 4}
"""Exchanges of a Ulysses group that may be on their way at a time, by schedule."""

__all__ = ["HIDING", "PENDING", "ScheduleName", "ScheduleSetting"]
