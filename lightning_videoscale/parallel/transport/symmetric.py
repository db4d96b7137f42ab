"""Transport by copy engine: every rank writes its pieces straight into its peers' memory. One host, NVIDIA GPUs.

A message lies, until its reader has copied it out, in a *slot* of the reader's memory. There is a ring of slots, used
in turn, and two flags for each slot and peer:

    sender    wait for released[slot, reader] of the slot's previous use · copy the piece · set arrived[slot, sender]
    reader    wait for arrived[slot, sender] · copy all pieces out, in one kernel · set released[slot, reader]

Both flags hold the number of the exchange and are only ever counted up. A slot is hence never written before its reader
is done, however late that is, and what `wait` returns is memory of its own, which autograd may keep. The pushes run on
a side stream, where they take no multiprocessor from the computation.

Where every piece goes follows from the sizes of all pieces between all ranks. A rank knows only those that it sends and
receives, so the ranks tell each other, once for every new shape. All of them then see at the same point whether the
message needs larger slots than there are, and take them together. This rests on Ulysses' sizes being products of a
share of the sender (tokens) and a share of the receiver (heads): a shape that is new to one rank is new to all.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis, SequenceMesh
from lightning_videoscale.parallel.transport.collective import CollectiveTransport
from lightning_videoscale.parallel.transport.peer_watchdog import Awaited
from lightning_videoscale.parallel.transport.slots import Arena, SlotLayout
from lightning_videoscale.parallel.transport.symmetric_memory import CudaFabric, Fabric, Finished, why_unavailable


class SymmetricTransport(CollectiveTransport):
    """Ulysses' all-to-all pushed by the copy engine through symmetric memory.

    Everything else is inherited: all-gathers and the messages of other axes (a ring's) go by collectives. Not
    traceable by `torch.compile`, and not to be captured in a CUDA graph.

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
        return self._arena.memory.nbytes if self._arena is not None else 0

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

    def wait(self, pending: Any) -> Tensor:
        """Makes the current stream wait for the pieces and copy them out of their slot."""
        return pending.finish() if isinstance(pending, SymmetricExchange) else super().wait(pending)

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

    def _open(self, message: Tensor, send: Sequence[int], receive: Sequence[int]) -> SymmetricExchange:
        if not message.is_contiguous() or message.shape != (sum(send),):
            raise ValueError(
                f"A message must be contiguous and have the {sum(send)} elements of its pieces; this has the shape "
                f"{tuple(message.shape)}, strides {message.stride()}."
            )
        if self.failure is not None:
            raise RuntimeError(self.failure)
        shape = tuple(n * message.itemsize for n in send), tuple(n * message.itemsize for n in receive)
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._agree(*shape)
        if self._arena is None or self._arena.capacity < layout.capacity:
            # Exchanges that are pending keep the arena they began in.
            self._arena = Arena(self._axis, self._fabric, self._slots, layout.capacity)
        return SymmetricExchange(self._fabric, self._arena, layout, message.detach().split(list(send)))

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
    """One exchange between the ranks of an axis, begun by `SymmetricTransport.open`; see `Exchange`."""

    def __init__(self, fabric: Fabric, arena: Arena, layout: SlotLayout, pieces: Sequence[Tensor]) -> None:
        self._fabric = fabric
        self._arena = arena
        self._layout = layout
        self._pieces = pieces
        self._number, self._slot = arena.begin()
        self._sent: set[int] = set()
        self._awaited: list[Awaited] = []
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
        released = {
            peer: Awaited(arena.released(slot, peer), arena.last_sent[slot][peer], arena.axis.ranks[peer])
            for peer in others
        }

        def copy() -> None:
            for peer in others:
                arena.memory.wait(released[peer].flag, released[peer].value)
                target = arena.piece(slot, self._layout, sender=me, reader=peer)
                # Bytes to bytes, contiguous: the copy engine's work, no kernel.
                target.copy_(self._pieces[peer].view(torch.uint8))
                arena.memory.signal(peer, arena.arrived(slot, me), self._number)

        self._awaited.extend(released.values())
        self._pushed = self._fabric.aside(copy)  # all together: a switch of streams takes the host long
        for peer in others:
            arena.last_sent[slot][peer] = self._number

    def finish(self) -> Tensor:
        """Returns the received pieces in the order of their senders, 1-D, for work issued later on the current stream.

        Raises:
            RuntimeError: If a piece was not sent, or a peer did not come.
        """
        if self._fabric.failure is not None:
            raise RuntimeError(self._fabric.failure)
        arena, slot, axis = self._arena, self._slot, self._arena.axis
        if lacking := sorted(set(range(axis.size)) - self._sent):
            raise RuntimeError(f"Nothing was sent to the positions {lacking} of the {axis.name} axis.")
        senders = [rank for rank in range(axis.size) if rank != axis.rank]
        awaited = [Awaited(arena.arrived(slot, rank), self._number, axis.ranks[rank]) for rank in senders]
        what = f"Exchange {self._number} of the {axis.name} axis on rank {axis.ranks[axis.rank]}"
        with self._fabric.watched(what, arena.memory, self._awaited + awaited):
            for arrived in awaited:
                arena.memory.wait(arrived.flag, arrived.value)
            result = torch.cat([self._received(rank) for rank in range(axis.size)])
            for rank in senders:
                arena.memory.signal(rank, arena.released(slot, axis.rank), self._number)
            if self._pushed is not None:
                self._pushed.wait()  # from here on the memory of the pieces may be used again
        arena.pending.remove(slot)
        return result

    def _received(self, sender: int) -> Tensor:
        me = self._arena.axis.rank
        if sender == me:
            return self._pieces[me]  # copied by the same kernel: the copy engine is slow within one device
        return self._arena.piece(self._slot, self._layout, sender, me).view(self._pieces[me].dtype)
