"""How messages get from rank to rank along an axis.

`Transport`            what a transport offers; all code outside this folder is written against it
`Exchange`             an all-to-all whose pieces are sent one by one
`ColumnExchange`       one whose pieces come to lie beside each other
`TransportName`        the names by which a strategy selects one, and `create_transport`, which makes it
`CollectiveTransport`  collectives on gloo and NCCL: runs everywhere, and is the oracle for the others
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis, SequenceMesh
from lightning_videoscale.parallel.transport.collective import CollectiveTransport, Join
from lightning_videoscale.parallel.transport.columns import CopiedColumns, beside_each_other

__all__ = [
    "DEFAULT_TRANSPORT",
    "CollectiveTransport",
    "ColumnExchange",
    "CopiedColumns",
    "Exchange",
    "Join",
    "Transport",
    "TransportName",
    "beside_each_other",
    "create_transport",
    "what_lacks",
]

TransportName = Literal["collective", "symmetric"]


class Exchange(Protocol):
    """An all-to-all whose pieces are sent as they become ready, begun by `open` or `begin`; for `Transport.wait`."""

    @property
    def pieces(self) -> Sequence[Tensor]:
        """What goes to each rank of the axis, 1-D, to be written before it is sent."""

    def send(self, *peers: int) -> None:
        """Sends the pieces for these positions on the axis, in this order; each once, this rank's own too."""


class ColumnExchange(Protocol):
    """Columns on their way from all ranks of an axis, begun by `Transport.begin_columns`."""

    def wait(self, *, keep: bool = False) -> Tensor:
        """Returns them beside each other, for work issued later on the current stream and before `done`; once.

        Args:
            keep: Whether they are used after `done`, too, which may cost a copy.

        Returns:
            (samples, rows, columns), contiguous.
        """

    def done(self) -> None:
        """Says that what the current stream holds so far has read them: others may be written there; once."""


class Transport(Protocol):
    """Moves flat messages between the ranks of an axis. Nothing here is differentiable: callers own the gradient."""

    @property
    def name(self) -> str:
        """The name by which a strategy selects the transport."""

    @property
    def traceable(self) -> bool:
        """Whether `torch.compile` can trace `exchange`; what is sent in pieces or as columns is for ops in any case."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's device that it takes now and that torch's own statistics lack."""

    @property
    def places(self) -> Hashable:
        """What messages lie in on their way: another value once one lies elsewhere. Who holds it, keeps the memory."""

    @property
    def failure(self) -> str | None:
        """Which peers did not come within the timeout, where a stream rather than the host waited for them."""

    def carrier(self, axis: Axis) -> str:
        """The name of the transport that the messages along an axis really take."""

    def close(self) -> None:
        """Gives back memory and groups; collective over the axis. The next message takes them anew."""

    def reset(self) -> None:
        """Puts the ranks back in step after an exception in the middle of a step; all of them call it, whoever raised.

        What was on its way is lost, and pending exchanges are forgotten. Drop what the ranks computed since the last
        step that was whole: it may hold anything. A rank whose host still waits for its device cannot come here.

        Raises:
            RuntimeError: On every rank, if a device has failed or does not come to rest, with the ranks and reasons.
            TimeoutError: With the ranks that did not call it.
        """

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

    def wait(self, pending: Any, join: Join | None = None) -> Tensor:
        """Returns the result of `all_to_all`, or of an exchange all of whose pieces are sent; the host does not wait.

        Args:
            pending: Returned by `all_to_all`, `open` or `begin`.
            join: Reads each piece where it lies, which spares a copy; left out, they are one behind the other, 1-D.
        """

    def open(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Exchange:
        """Begins an `exchange` of pieces that are written later; all ranks of the axis begin theirs in one order.

        Args:
            message: As in `exchange`; a piece is not to be written to from when it is sent until the exchange is
                finished.
            send: As in `exchange`.
            receive: As in `exchange`.
            axis: The ranks that take part.
        """

    def begin(self, like: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Exchange:
        """As `open`, with memory of the transport's own for the pieces; this rank's is the one that it receives.

        Args:
            like: Of the pieces' dtype and device.
            send: As in `exchange`.
            receive: As in `exchange`.
            axis: The ranks that take part.
        """

    def begin_columns(
        self, columns: Tensor, lengths: Sequence[int], widths: Sequence[int], axis: Axis
    ) -> ColumnExchange:
        """Starts to send every rank the rows that it is to have; there they lie beside what others have of those rows.

        The current stream is that on which the columns before these were `ColumnExchange.done`.

        Args:
            columns: (rows of all ranks, samples, ``widths[axis.rank]``), contiguous; not to be written to before
                `ColumnExchange.wait`.
            lengths: Rows of each rank.
            widths: Columns that come from each rank, in this order.
            axis: The ranks that take part.
        """

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """Concatenates the ranks' tensors along dim 0.

        Args:
            x: This rank's tensor, of ``lengths[axis.rank]`` rows.
            lengths: Rows of each rank's tensor.
            axis: The ranks that take part.
        """


DEFAULT_TRANSPORT: Transport = CollectiveTransport()
"""What split models use that were given no other; it has no state."""


def create_transport(
    name: TransportName, mesh: SequenceMesh, device: torch.device, timeout: timedelta, pending: int = 2
) -> Transport:
    """Returns the transport of that name for a mesh; collective over all ranks.

    Args:
        name: ``"collective"`` or ``"symmetric"``.
        mesh: The mesh whose ranks exchange.
        device: This rank's device.
        timeout: How long to wait for a peer (``"symmetric"``; collectives have the timeout of their groups).
        pending: Exchanges that may be on their way at a time (``"symmetric"``, which has memory for so many).

    Raises:
        RuntimeError: On every rank, with all ranks' reasons, if the ranks of a Ulysses group cannot write into each
            other's memory.
    """
    if name == "collective":
        return CollectiveTransport()
    from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport

    return SymmetricTransport.create(mesh, device, timeout, pending)


def what_lacks(name: TransportName, device: torch.device) -> str:
    """Returns what a device, torch or the driver lacks for a transport, by trying; empty if nothing."""
    if name == "collective":
        return ""
    from lightning_videoscale.parallel.transport import symmetric_memory

    return symmetric_memory.what_lacks(device)
