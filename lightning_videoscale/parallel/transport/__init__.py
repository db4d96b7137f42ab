"""How bytes travel between the ranks of an axis.

`Transport`            what a transport offers; schedules and sharding are written against it
`CollectiveTransport`  functional collectives on gloo and NCCL: runs everywhere, and is the oracle for the others
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport.collective import CollectiveTransport

__all__ = ["CollectiveTransport", "Transport"]


class Transport(Protocol):
    """Moves flat messages between the ranks of an axis. Nothing here is differentiable: callers own the gradient."""

    @property
    def name(self) -> str:
        """The name by which a strategy selects the transport."""

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Starts an all-to-all and returns its result, which must pass through `wait` before it is read.

        Args:
            message: 1-D, contiguous; the pieces for the ranks of the axis, in their order.
            send: Elements of each piece; 0 where nothing is sent, as by a ring to all but the next rank.
            receive: Elements that come from each rank.
            axis: The ranks that take part.

        Returns:
            1-D tensor of ``sum(receive)`` elements, the pieces in the order of their senders.
        """

    def wait(self, pending: Tensor) -> Tensor:
        """Returns the finished result of `all_to_all`, which is the caller's to read and write.

        Work issued later on the current stream may do so; the host does not wait.
        """

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """Concatenates the ranks' tensors along dim 0.

        Args:
            x: This rank's tensor, of ``lengths[axis.rank]`` rows.
            lengths: Rows of each rank's tensor.
            axis: The ranks that take part.
        """
