"""What a rank did with the time of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Phase = Literal["data", "forward", "backward", "wait", "exchange", "optimizer", "other"]
"""A field of `StepTimes`."""


class StepTimes(NamedTuple):
    """The time of one rank from the end of a micro-batch to the end of the next, in seconds; no part counts twice.

    On a CUDA device it is the device's time, so that what the host does while the device is busy costs nothing.

    Attributes:
        data: From asking the loader for a batch to the start of the batch: loading, transfer, sharing in the group.
        forward: Forward pass, without what it waited and exchanged. In manual optimization it is all of
            ``training_step`` that is no other phase.
        backward: Backward pass, recomputation included, without what it waited and exchanged. DDP reduces gradients
            beside it: on a rank that is ahead, reductions that wait for another rank take a part of the device from
            what is left of the pass, which then takes longer than it would alone.
        wait: At synchronisation with other ranks: gathers of parameters, reductions of gradients. Part of it is the
            transfer itself; what exceeds the least wait of all ranks is waiting for a slower one.
        exchange: Sequence-parallel exchanges that nothing hid. Those inside of compiled blocks are part of forward and
            backward.
        optimizer: From the end of backward to the end of the micro-batch: clipping and the optimizer's step. In manual
            optimization it is these calls alone.
        other: Between micro-batches, but for the data: validation, checkpoints, logging, what callbacks do before the
            step.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    wait: float = 0.0
    exchange: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def compute(self) -> float:
        """What the rank itself worked for the micro-batch: forward and backward."""
        return self.forward + self.backward

    @property
    def work(self) -> float:
        """What the micro-batch costs the rank's sequence-parallel group: its compute, and the exchanges that all pay.

        Cost models are fitted to it, and data-parallel ranks are compared by it.
        """
        return self.compute + self.exchange

    @property
    def total(self) -> float:
        """The whole time."""
        return sum(self)


def add_up(times: Iterable[StepTimes]) -> StepTimes:
    """Returns the sums, for example of the micro-batches of an optimizer step."""
    return StepTimes(*(sum(column) for column in zip(*times, strict=True)))
