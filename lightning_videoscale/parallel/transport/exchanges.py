"""Exchanges of the `symmetric` transport: how pieces get from rank to rank through slots.

`PushedExchange`  of a message that is there: senders write it into their readers' slots
`PulledExchange`  of pieces that are computed: they are written to a slot of the sender, from which readers fetch them
`JoinedExchange`  of columns that are there: senders write them beside each other into their readers' slots

There are two flags for each slot and peer. To take a flag is to wait until it is set, and to clear it; at first all
slots are released.

    pushed   sender   take released[slot, reader] · copy the piece to the reader · set arrived[slot, sender]
             reader   take arrived[slot, sender] · copy all pieces out, in one kernel · set released[slot, reader]
    pulled   sender   take released[slot, reader] · compute the piece · set arrived[slot, sender]
             reader   take arrived[slot, sender] · copy the piece here · set released[slot, reader]
    joined   sender   take released[slot, reader] · copy the columns to the reader · set arrived[slot, sender]
             reader   take arrived[slot, sender] · compute with all columns · set released[slot, reader]

Each way has slots of its own: a peer could write to what another has yet to fetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_videoscale.parallel.transport.collective import Join
from lightning_videoscale.parallel.transport.peer_watchdog import Taking
from lightning_videoscale.parallel.transport.slots import Slot, SlotLayout
from lightning_videoscale.parallel.transport.symmetric_memory import Finished, Interconnect

_WORD = torch.complex128  # what a thread copies at once; what the bytes stand for is nothing to a copy


class SymmetricExchange:
    """One exchange between the ranks of an axis; see `Exchange`."""

    pieces: Sequence[Tensor]

    def __init__(self, interconnect: Interconnect, slot: Slot, layout: SlotLayout) -> None:
        self._interconnect = interconnect
        self._slot = slot
        self._layout = layout
        self._me, self._size = slot.axis.rank, slot.axis.size
        slot.pending = self
        self._sent: set[int] = set()
        self._takings: list[Taking] = []
        self._copied: Finished | None = None

    @staticmethod
    def layout(sizes: list[list[int]]) -> SlotLayout:
        """Where what goes from rank to rank lies on its way; ``sizes[s][r]`` bytes from rank s to rank r."""
        raise NotImplementedError

    def send(self, *peers: int) -> None:
        """Sends pieces, after what the current stream holds so far.

        Raises:
            RuntimeError: If the exchange is not pending.
            ValueError: If a piece was sent already; nothing is sent then.
        """
        self._check_pending()
        if again := self._sent.intersection(peers):
            name = self._slot.axis.name
            raise ValueError(f"The pieces for the positions {sorted(again)} of the {name} axis were sent.")
        self._sent.update(peers)
        if others := [peer for peer in peers if peer != self._me]:
            self._send(others)

    def finish(self, join: Join | None = None) -> Tensor:
        """Returns what is received, for work issued later on the current stream; see `Transport.wait`.

        Raises:
            RuntimeError: If a piece was not sent, a peer did not come, or the exchange is not pending.
        """
        result = self._arrived(join)
        self._slot.pending = None
        return result

    def _arrived(self, join: Join | None = None) -> Tensor:
        """What is received; the slot is this exchange's yet."""
        if self._interconnect.failure is not None:
            raise RuntimeError(self._interconnect.failure)
        self._check_pending()
        axis = self._slot.axis
        if lacking := sorted(set(range(self._size)) - self._sent):
            raise RuntimeError(f"Nothing was sent to the positions {lacking} of the {axis.name} axis.")
        with self._watched():
            return self._receive(join)

    def _send(self, peers: Sequence[int]) -> None:
        raise NotImplementedError

    def _receive(self, join: Join | None) -> Tensor:
        raise NotImplementedError

    def _check_pending(self) -> None:
        slot = self._slot
        if slot.pending is not self:
            raise RuntimeError(
                f"This exchange of the {slot.axis.name} axis, of slot {slot.number}, is not pending any more: "
                "`wait` has finished it, or `reset` has forgotten it. Begin another one."
            )

    def _watched(self) -> AbstractContextManager[None]:
        axis = self._slot.axis
        what = f"An exchange of the {axis.name} axis on rank {axis.ranks[self._me]}"
        return self._interconnect.watched(what, self._slot.memory, self._takings)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._me]

    def _take(self, flag: Callable[[int], int], peers: Sequence[int]) -> None:
        ranks = {flag(peer): self._slot.axis.ranks[peer] for peer in peers}
        self._takings.append(self._interconnect.take(self._slot.memory, ranks))

    def _tell(self, flag: Callable[[int], int], peers: Sequence[int]) -> None:
        for peer in peers:
            self._slot.memory.signal(peer, flag(self._me))


class PushedExchange(SymmetricExchange):
    """Of a message that is there, as pieces for each rank."""

    def __init__(self, interconnect: Interconnect, slot: Slot, layout: SlotLayout, pieces: Sequence[Tensor]) -> None:
        super().__init__(interconnect, slot, layout)
        self.pieces = pieces

    @staticmethod
    def layout(sizes: list[list[int]]) -> SlotLayout:
        """At its reader."""
        return SlotLayout(sizes)

    def _send(self, peers: Sequence[int]) -> None:
        def copy() -> None:
            self._take(self._slot.released, peers)
            for peer in peers:
                # Bytes to bytes, contiguous: the copy engine's work, no kernel.
                self._place(self._me, peer).copy_(self.pieces[peer].view(torch.uint8))
                self._tell(self._slot.arrived, [peer])

        self._copied = self._interconnect.aside(copy)  # all together: a switch of streams takes the host long

    def _receive(self, join: Join | None) -> Tensor:
        if self._copied is not None:
            self._copied.wait()  # first: even in one queue with the pushes, no wait keeps them from the peers
        self._take(self._slot.arrived, self._others)
        pieces = list(self.pieces)  # this rank's own is copied by the same kernel
        for rank in self._others:
            pieces[rank] = self._place(rank, self._me).view(self.pieces[self._me].dtype)
        result = torch.cat(pieces) if join is None else join(pieces)
        self._tell(self._slot.released, self._others)
        return result

    def _place(self, sender: int, reader: int) -> Tensor:
        return self._slot.piece(self._layout, sender, holder=reader)


class PulledExchange(SymmetricExchange):
    """Of pieces that are computed; this rank's own where it is received, 1-D."""

    def __init__(
        self, interconnect: Interconnect, slot: Slot, layout: SlotLayout, received: Tensor, receive: Sequence[int]
    ) -> None:
        super().__init__(interconnect, slot, layout)
        self._received = received
        self._places = received.split(list(receive))
        with self._watched():
            self._take(slot.released, self._others)
        self._takings = []  # what comes later, the stream does not wait for here
        self.pieces = [
            self._places[self._me] if peer == self._me else self._place(self._me, peer).view(received.dtype)
            for peer in range(self._size)
        ]

    @staticmethod
    def layout(sizes: list[list[int]]) -> SlotLayout:
        """At its sender."""
        return SlotLayout([list(column) for column in zip(*sizes, strict=True)])

    def _send(self, peers: Sequence[int]) -> None:
        self._tell(self._slot.arrived, peers)

        def copy() -> None:
            for peer in peers:
                # All ranks send in one order, each to its next ranks first: so these are the first that send here.
                sender = (2 * self._me - peer) % self._size
                self._take(self._slot.arrived, [sender])
                self._places[sender].view(torch.uint8).copy_(self._place(sender, self._me))
                self._tell(self._slot.released, [sender])

        self._copied = self._interconnect.aside(copy)

    def _receive(self, join: Join | None) -> Tensor:
        if self._copied is not None:
            self._copied.wait()
        return self._received if join is None else join(self._places)

    def _place(self, sender: int, reader: int) -> Tensor:
        return self._slot.piece(self._layout, reader, holder=sender)


class JoinedExchange(SymmetricExchange):
    """Of columns, which are read in the slot where those of all ranks lie beside each other; see `ColumnExchange`."""

    def __init__(
        self,
        interconnect: Interconnect,
        slot: Slot,
        layout: SlotLayout,
        columns: Tensor,
        lengths: Sequence[int],
        widths: Sequence[int],
    ) -> None:
        super().__init__(interconnect, slot, layout)
        self._lengths, self._widths = lengths, widths
        self._like = columns
        self.pieces = columns.split(list(lengths))

    @staticmethod
    def layout(sizes: list[list[int]]) -> SlotLayout:
        """At its reader, with the reader's own."""
        return SlotLayout(sizes, own=True)

    def start(self) -> None:
        """Sends all pieces, those for the next ranks first, and then puts this rank's own in its place."""
        self.send(*((self._me + step) % self._size for step in range(1, self._size + 1)))
        target, source = _in_words(self._place(self._me), self.pieces[self._me].transpose(0, 1))
        target.copy_(source)

    def wait(self, *, keep: bool = False) -> Tensor:
        """See `ColumnExchange`.

        Raises:
            RuntimeError: As `finish`.
        """
        matrix = self._arrived()
        return matrix.clone() if keep else matrix

    def done(self) -> None:
        """See `ColumnExchange`.

        Raises:
            RuntimeError: If the exchange is not pending.
        """
        self._check_pending()
        self._tell(self._slot.released, self._others)
        self._slot.pending = None

    def _send(self, peers: Sequence[int]) -> None:
        def copy() -> None:
            self._take(self._slot.released, peers)
            for peer in peers:
                samples = zip(self._place(peer).unbind(), self.pieces[peer].unbind(1), strict=True)
                for target, source in samples:
                    self._interconnect.copy_rows(target, source)
                self._tell(self._slot.arrived, [peer])

        self._copied = self._interconnect.aside(copy)

    def _receive(self, join: Join | None) -> Tensor:
        if self._copied is not None:
            self._copied.wait()
        self._take(self._slot.arrived, self._others)
        return self._matrix(self._me)

    def _place(self, reader: int) -> Tensor:
        """This rank's columns, (samples, rows, its width), in the reader's slot."""
        first = sum(self._widths[: self._me])
        return self._matrix(reader).narrow(2, first, self._widths[self._me])

    def _matrix(self, reader: int) -> Tensor:
        """(samples, rows, all columns) in the reader's slot."""
        shape = self._like.shape[1], self._lengths[reader], sum(self._widths)
        nbytes = math.prod(shape) * self._like.itemsize
        return self._slot.whole(nbytes, reader).view(self._like.dtype).view(shape)


def _in_words(*tensors: Tensor) -> list[Tensor]:
    """The same with elements of 16 bytes, if all allow it: with those, torch copies rows that lie apart faster."""
    many = _WORD.itemsize // tensors[0].itemsize
    parts = [part for x in tensors for part in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])]
    return [x.view(_WORD) for x in tensors] if all(part % many == 0 for part in parts) else list(tensors)
