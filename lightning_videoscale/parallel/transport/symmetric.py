"""Transport by copy engine: every rank writes its pieces straight into its peers' memory. One host, NVIDIA GPUs.

A message lies, until its reader has copied it out, in a *slot* of the reader's memory. There are a few slots, and two
flags for each slot and peer:

    sender    take released[slot, reader] · copy the piece · set arrived[slot, sender]
    reader    take arrived[slot, sender] · copy all pieces out, in one kernel · set released[slot, reader]

To take a flag is to wait until it is set, and to clear it; at first all slots are released. A slot is hence never
written before its reader is done, however late that is, and what `wait` returns is memory of its own, which autograd
may keep. Flags are set and cleared, never counted, and an exchange takes the first slot that is free: so what a program
exchanges between two points is the same each time, and a CUDA graph may repeat it. The pushes run on a side stream,
where they take no multiprocessor from the computation.

Where every piece goes follows from the sizes of all pieces between all ranks. A rank knows only those that it sends and
receives, so the ranks tell each other, once for every new shape. All of them then see at the same point whether the
message needs larger slots than there are, and take them together. This rests on Ulysses' sizes being products of a
share of the sender (tokens) and a share of the receiver (heads): a shape that is new to one rank is new to all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.compat.torch.cuda import copy_together
from lightning_videoscale.parallel.mesh import Axis, SequenceMesh
from lightning_videoscale.parallel.transport.collective import CollectiveTransport
from lightning_videoscale.parallel.transport.peer_watchdog import Taking
from lightning_videoscale.parallel.transport.slots import Arena, SlotLayout
from lightning_videoscale.parallel.transport.symmetric_memory import CudaFabric, Fabric, Finished, why_unavailable


class SymmetricTransport(CollectiveTransport):
    """Ulysses' all-to-all pushed by the copy engine through symmetric memory.

    Everything else is inherited: all-gathers and the messages of other axes (a ring's) go by collectives. Not
    traceable by `torch.compile`. Slots that a CUDA graph uses are kept until `close`.

    Args:
        fabric: Memory that peers can write.
        axis: The ranks whose all-to-all is pushed.
        slots: Exchanges that may be pending at a time; each takes as much memory as the largest message received.
    """

    name = "symmetric"

    def __init__(self, fabric: Fabric, axis: Axis, slots: int) -> None:
        self._fabric = fabric
        self._axis = axis
        self._slots = slots
        self._layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], SlotLayout] = {}
        self._arena: Arena | None = None
        self._captured: list[Arena] = []  # that graphs use, the newest last

    @classmethod
    def create(cls, mesh: SequenceMesh, device: torch.device, timeout: timedelta, slots: int = 2) -> SymmetricTransport:
        """Returns a transport for the Ulysses groups of a mesh; see `create_transport`.

        Two slots let a rank send while a peer still reads; serial layers never have more than one exchange pending.
        """
        if reasons := why_unavailable(mesh.ulysses, device):
            raise RuntimeError(
                "transport='symmetric' needs the GPUs of a Ulysses group on one host, with access to each other's "
                f"memory, but {'; '.join(reasons)}. Use transport='collective', or a smaller ulysses_size."
            )
        token = [f"symmetric-{uuid.uuid4()}"]
        dist.broadcast_object_list(token, 0)
        return cls(CudaFabric(device, token[0], timeout), mesh.ulysses, slots)

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's GPU that slots and flags take now; torch's own statistics lack them."""
        arenas = {id(arena): arena for arena in (*self._captured, self._arena) if arena is not None}
        return sum(arena.memory.nbytes for arena in arenas.values())

    @property
    def failure(self) -> str | None:
        """Which peers did not come within the timeout, once one did not; the device is unusable from then on."""
        return self._fabric.failure

    def carrier(self, axis: Axis) -> str:
        """Its own name along the Ulysses axis, else that of the collectives."""
        return self.name if axis.ranks == self._axis.ranks else super().name

    def close(self) -> None:
        """Frees the slots once no peer reads or writes them any more; collective over the Ulysses axis.

        Raises:
            TimeoutError: If a peer does not come.
        """
        if self._arena is not None:
            self._fabric.close(self._axis)
            self._arena = None
            self._captured.clear()

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Pushes the pieces and copies those of the peers out of their slot."""
        if axis.ranks != self._axis.ranks:
            return super().exchange(message, send, receive, axis)
        return self.wait(self.all_to_all(message, send, receive, axis))

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """Starts the pushes."""
        if axis.ranks != self._axis.ranks:
            return super().all_to_all(message, send, receive, axis)
        exchange = self._open(message, send, receive)
        # Every rank starts with another peer, so that no link is shared.
        exchange.send(*((axis.rank + step) % axis.size for step in range(1, axis.size + 1)))
        return exchange

    def wait(self, pending: Any, join: Callable[[Sequence[Tensor]], Tensor] | None = None) -> Tensor:
        """Makes the current stream wait for the pieces and copy them out of their slot."""
        return pending.finish(join) if isinstance(pending, SymmetricExchange) else super().wait(pending, join)

    def open(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """Begins an exchange whose pieces are pushed as they become ready; see `Transport`.

        The size of a piece is this rank's share of one thing times its reader's share of another.

        Raises:
            RuntimeError: If as many exchanges are pending as there are slots, a peer did not come, or the ranks
                disagree about the sizes.
            TimeoutError: If a peer does not tell its sizes.
            ValueError: If the message is not contiguous or does not have the pieces' elements.
        """
        if axis.ranks != self._axis.ranks:
            return super().open(message, send, receive, axis)
        return self._open(message, send, receive)

    def begin(self, like: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """See `Transport` and `open`; this rank's own piece is not copied."""
        if axis.ranks != self._axis.ranks:
            return super().begin(like, send, receive, axis)
        me, received = axis.rank, like.new_empty(sum(receive))
        others = iter(like.new_empty(sum(send) - send[me]).split([n for peer, n in enumerate(send) if peer != me]))
        own = received.split(list(receive))[me]
        pieces = [own if peer == me else next(others) for peer in range(axis.size)]
        return self._exchange(pieces, send, receive, received)

    def _open(self, message: Tensor, send: Sequence[int], receive: Sequence[int]) -> SymmetricExchange:
        if not message.is_contiguous() or message.shape != (sum(send),):
            raise ValueError(
                f"A message must be contiguous and have the {sum(send)} elements of its pieces; this has the shape "
                f"{tuple(message.shape)}, strides {message.stride()}."
            )
        return self._exchange(message.detach().split(list(send)), send, receive)

    def _exchange(
        self, pieces: Sequence[Tensor], send: Sequence[int], receive: Sequence[int], received: Tensor | None = None
    ) -> SymmetricExchange:
        if self.failure is not None:
            raise RuntimeError(self.failure)
        itemsize = pieces[0].itemsize
        shape = tuple(n * itemsize for n in send), tuple(n * itemsize for n in receive)
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._agree(*shape)
        if self._arena is None or self._arena.capacity < layout.capacity:
            # Exchanges that are pending keep the arena they began in.
            self._arena = Arena(self._axis, self._fabric, self._slots, layout.capacity)
        if self._fabric.is_capturing and self._arena not in self._captured:
            self._captured.append(self._arena)
        return SymmetricExchange(self._fabric, self._arena, layout, pieces, received)

    def _agree(self, send: tuple[int, ...], receive: tuple[int, ...]) -> SlotLayout:
        axis = self._axis
        sizes = self._fabric.agree(send, axis)
        coming = tuple(theirs[axis.rank] for theirs in sizes)
        if coming != receive:
            raise RuntimeError(
                f"The ranks {axis.ranks} of the {axis.name} axis disagree: they send {coming} bytes to rank "
                f"{axis.ranks[axis.rank]}, which expects {receive}."
            )
        return SlotLayout(sizes)


class SymmetricExchange:
    """One exchange between the ranks of an axis, begun by `SymmetricTransport`; see `Exchange`.

    Args:
        fabric: What moves data.
        arena: Where to.
        layout: Of the pieces in a slot.
        pieces: What goes to each rank.
        received: Where what is received goes, one behind the other, this rank's own piece being there already; None if
            all are to be read from where they lie.
    """

    def __init__(
        self, fabric: Fabric, arena: Arena, layout: SlotLayout, pieces: Sequence[Tensor], received: Tensor | None
    ) -> None:
        self.pieces = pieces
        self._fabric = fabric
        self._arena = arena
        self._layout = layout
        self._received = received
        self._slot = arena.begin()
        self._sent: set[int] = set()
        self._takings: list[Taking] = []
        self._pushed: Finished | None = None

    def send(self, *peers: int) -> None:
        """Starts to copy pieces to ranks, after what the current stream holds so far.

        Raises:
            ValueError: If a piece was sent already; nothing is sent then.
        """
        arena, slot, me = self._arena, self._slot, self._arena.axis.rank
        if again := self._sent.intersection(peers):
            raise ValueError(f"The pieces for the positions {sorted(again)} of the {arena.axis.name} axis were sent.")
        self._sent.update(peers)
        others = [peer for peer in peers if peer != me]
        if not others:
            return

        def copy() -> None:
            self._take({arena.released(slot, peer): arena.axis.ranks[peer] for peer in others})
            for peer in others:
                target = arena.piece(slot, self._layout, sender=me, reader=peer)
                # Bytes to bytes, contiguous: the copy engine's work, no kernel.
                target.copy_(self.pieces[peer].view(torch.uint8))
                arena.memory.signal(peer, arena.arrived(slot, me))

        self._pushed = self._fabric.aside(copy)  # all together: a switch of streams takes the host long

    def finish(self, join: Callable[[Sequence[Tensor]], Tensor] | None = None) -> Tensor:
        """Returns what is received, for work issued later on the current stream.

        Args:
            join: As in `Transport.wait`.

        Raises:
            RuntimeError: If a piece was not sent, or a peer did not come.
        """
        if self._fabric.failure is not None:
            raise RuntimeError(self._fabric.failure)
        arena, slot, axis = self._arena, self._slot, self._arena.axis
        if lacking := sorted(set(range(axis.size)) - self._sent):
            raise RuntimeError(f"Nothing was sent to the positions {lacking} of the {axis.name} axis.")
        senders = [rank for rank in range(axis.size) if rank != axis.rank]
        what = f"An exchange of the {axis.name} axis on rank {axis.ranks[axis.rank]}"
        with self._fabric.watched(what, arena.memory, self._takings):
            self._take({arena.arrived(slot, rank): axis.ranks[rank] for rank in senders})
            result = self._copied_out(senders, join)
            for rank in senders:
                arena.memory.signal(rank, arena.released(slot, axis.rank))
            if self._pushed is not None:
                self._pushed.wait()  # from here on the memory of the pieces may be used again
        arena.finish(slot)
        return result

    def _take(self, ranks: dict[int, int]) -> None:
        self._takings.append(self._fabric.take(self._arena.memory, ranks))

    def _copied_out(self, senders: Sequence[int], join: Callable[[Sequence[Tensor]], Tensor] | None) -> Tensor:
        me, pieces = self._arena.axis.rank, list(self.pieces)
        for rank in senders:
            pieces[rank] = self._arena.piece(self._slot, self._layout, rank, me).view(self.pieces[me].dtype)
        if join is not None:
            return join(pieces)
        if self._received is None:
            return torch.cat(pieces)  # this rank's too: the copy engine is slow within one device
        places = self._received.split([piece.numel() for piece in pieces])
        copy_together([places[rank] for rank in senders], [pieces[rank] for rank in senders])
        return self._received
