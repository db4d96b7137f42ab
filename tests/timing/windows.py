"""Windows of steps as the step log hands them over, from times and loads that are written down."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_videoscale.timing import MicroBatchLoad, StepTimes, StepWindow


def window_of(
    times: Sequence[Sequence[StepTimes]],
    loads: Sequence[Sequence[MicroBatchLoad]] | None = None,
    micro_batches: Sequence[int] | None = None,
    dp_ranks: Sequence[int] | None = None,
    in_slots: bool = False,
) -> StepWindow:
    """Returns a window.

    Args:
        times: Of every rank and micro-batch.
        loads: Likewise; None: the batches do not tell.
        micro_batches: Of each step; None: one.
        dp_ranks: Of every rank; None: each has its own.
        in_slots: Whether ranks wait in every micro-batch.
    """
    loads = loads or [[MicroBatchLoad()] * len(row) for row in times]
    rows = [[(*t, *load) for t, load in zip(*of_rank, strict=True)] for of_rank in zip(times, loads, strict=True)]
    return StepWindow(
        dp_ranks=list(dp_ranks or range(len(times))),
        table=torch.tensor(rows, dtype=torch.float64),
        micro_batches=list(micro_batches or [1] * len(times[0])),
        values=torch.zeros(len(times), 0),
        in_slots=in_slots,
    )
