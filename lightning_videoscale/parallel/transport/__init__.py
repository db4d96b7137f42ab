"""How bytes travel between the ranks of an axis.

`Transport`            what a transport offers; schedules and sharding are written against it
`CollectiveTransport`  collectives on gloo and NCCL: runs everywhere, and is the oracle for the others
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport.collective import CollectiveTransport

__all__ = ["CollectiveTransport", "Transport"]


class Transport(Protocol):
    """Moves flat messages between the ranks of an axis. Nothing here is differentiable: callers own the gradient."""

    @property
    def name(self) -> str:
        """The name by which a strategy selects the transport."""

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """All-to-all whose result work issued later on the current stream may read and write.

        Args:
            message: 1-D, contiguous; the pieces for the ranks of the axis, in their order.
            send: Elements of each piece; 0 where nothing is sent, as by a ring to all but the next rank.
            receive: Elements that come from each rank.
            axis: The ranks that take part.

        Returns:
            1-D tensor of ``sum(receive)`` elements, the pieces in the order of their senders.
        """

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """Starts an `exchange` that other work may hide, and returns what `wait` takes, once."""

    def wait(self, pending: Any) -> Tensor:
        """Returns the result of `all_to_all`; the host does not wait."""

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """Concatenates the ranks' tensors along dim 0.

        Args:
            x: This rank's tensor, of ``lengths[axis.rank]`` rows.
            lengths: Rows of each rank's tensor.
            axis: The ranks that take part.
        """
