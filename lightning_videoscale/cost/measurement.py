"""One measured micro-batch: what a training step of B samples of S tokens took."""

from __future__ import annotations

from typing import NamedTuple


class Measurement(NamedTuple):
    """A point of the shape benchmark, or a micro-batch of a run.

    Attributes:
        samples: Batch size B.
        sequence_length: Tokens S of one sample.
        seconds: Of the micro-batch: forward, backward and the exchanges in its sequence-parallel group, without waits.
        peak_bytes: Highest memory in use meanwhile, beside gradients of the step's earlier micro-batches; None where it
            was not measured.
        dp_rank: The data-parallel rank that computed it.
        by_graph: Whether it ran by CUDA graphs, so that it did not wait for the host.
        first_peak_bytes: As `peak_bytes`, where it is the first micro-batch of its step: gradients of the step before
            are there in its forward, and dropped before its backward.
        start_bytes: Of that one, the most that it takes in training before gradients of its own are there.
    """

    samples: int
    sequence_length: int
    seconds: float
    peak_bytes: float | None = None
    dp_rank: int = 0
    by_graph: bool = False
    first_peak_bytes: float | None = None
    start_bytes: float | None = None
