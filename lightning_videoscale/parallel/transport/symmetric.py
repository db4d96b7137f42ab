"""Transport by copy engine: every rank reads and writes its peers' memory. One host, NVIDIA GPUs.

On its way a piece lies in a *slot*, memory that peers reach, whose use `exchanges` describes. What `wait` returns is
memory of its own, which autograd may keep; columns alone are read in their slot. Flags in that memory tell when a piece
is there, and when it was read: a slot is never written before its reader is done, however late that is. They are set
and cleared, never counted, and an exchange takes the first slot that is free: so what a program exchanges between two
points is the same each time, and a CUDA graph may repeat it. Copies between ranks run on a side stream, where they take
no multiprocessor from the computation.

Where every piece goes follows from the sizes of all pieces between all ranks. Of columns a rank knows them all. Of
other messages it knows only those that it sends and receives, so the ranks tell each other, once for every new shape.
All of them then see at the same point whether the message needs a larger slot than there is, and take it together. This
rests on Ulysses' sizes being products of a share of the sender (tokens) and a share of the receiver (heads): a shape
that is new to one rank is new to all.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis, SequenceMesh
from lightning_videoscale.parallel.transport.collective import CollectiveTransport, Join
from lightning_videoscale.parallel.transport.columns import check_columns
from lightning_videoscale.parallel.transport.exchanges import (
    JoinedExchange,
    PulledExchange,
    PushedExchange,
    SymmetricExchange,
)
from lightning_videoscale.parallel.transport.slots import Slot, SlotLayout
from lightning_videoscale.parallel.transport.symmetric_memory import CudaInterconnect, Interconnect, why_unavailable
from lightning_videoscale.ranks import of_first_rank

_WAYS: tuple[type[SymmetricExchange], ...] = PushedExchange, PulledExchange, JoinedExchange


class SymmetricTransport(CollectiveTransport):
    """Ulysses' all-to-all by the copy engine through symmetric memory.

    Messages are pushed, those begun by `begin` are pulled, and columns are joined; see `exchanges`.
    Everything else is inherited: all-gathers and the messages of other axes (a ring's) go by collectives. Compiled
    code calls it by ops. Who repeats exchanges by a CUDA graph holds `places`, or their memory goes.

    Args:
        interconnect: Memory that peers can write.
        axis: The ranks whose all-to-all is pushed.
        slots: Exchanges of each way that may be pending at a time. Each takes as much memory as the largest message
            that it has had.
    """

    name = "symmetric"
    traceable = False

    def __init__(self, interconnect: Interconnect, axis: Axis, slots: int) -> None:
        self._interconnect = interconnect
        self._axis = axis
        self._most = slots
        self._sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[int]]] = {}
        self._layouts: dict[tuple[Any, ...], SlotLayout] = {}
        self._slots: dict[type[SymmetricExchange], list[Slot]] = {way: [] for way in _WAYS}
        self._known: weakref.WeakSet[Slot] = weakref.WeakSet()  # with those that graphs alone hold
        self._has_begun = False  # to take memory, as all ranks have or none

    @classmethod
    def create(cls, mesh: SequenceMesh, device: torch.device, timeout: timedelta, slots: int = 2) -> Self:
        """Returns a transport for the Ulysses groups of a mesh; see `create_transport`.

        Two slots let a rank send while a peer still reads; serial layers never have more than one exchange pending.
        """
        if reasons := why_unavailable(mesh.ulysses, device):
            raise RuntimeError(
                "transport='symmetric' needs the GPUs of a Ulysses group on one host, with access to each other's "
                f"memory, but {'; '.join(reasons)}. Use transport='collective', or a smaller ulysses_size."
            )
        token = of_first_rank(f"symmetric-{uuid.uuid4()}")
        return cls(CudaInterconnect(device, token, timeout), mesh.ulysses, slots)

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's GPU that slots and flags take now; torch's own statistics lack them."""
        return sum(slot.memory.nbytes for slot in self._known)

    @property
    def places(self) -> Hashable:
        """See `Transport`."""
        return tuple(slot for slots in self._slots.values() for slot in slots)

    @property
    def failure(self) -> str | None:
        """Which peers did not come within the timeout, once one did not; the device is unusable from then on."""
        return self._interconnect.failure

    def carrier(self, axis: Axis) -> str:
        """Its own name along the Ulysses axis, else that of the collectives."""
        return self.name if axis.ranks == self._axis.ranks else super().name

    def close(self) -> None:
        """Lets go of the slots once no peer reads or writes them any more; collective over the Ulysses axis.

        Raises:
            TimeoutError: If a peer does not come.
        """
        if self._has_begun:
            self._interconnect.close(self._axis)
            for slot in self._known:
                slot.pending = None  # what nobody has finished would keep the memory
            for slots in self._slots.values():
                slots.clear()
            self._has_begun = False

    def reset(self) -> None:
        """See `Transport`; collective over the Ulysses axis, and the host waits for the device.

        Whole steps that devices are still at are done first. Streams that wait for what a peer never sends are then
        released. Memory stays where it is, and graphs that were captured stay valid.
        What only some ranks have of sizes and memory, as the exception came in between, is dropped on all of them.

        Raises:
            RuntimeError: As in `Transport`; nothing is as before then, and the processes are to be ended.
            TimeoutError: Likewise.
        """
        self._interconnect.renew()
        capacities = [[slot.capacity for slot in slots] for slots in self._slots.values()]
        told = [list(self._sizes.values()), capacities]
        everyone = self._interconnect.agree(told, self._axis, "to call `reset` of the transport")
        # All are here: nobody begins exchanges any more, nor computes on with what released streams make up.
        slots = list(self._known)
        self._come_to_rest(slots)
        self._keep_common(everyone)
        for slot in slots:
            slot.restart()
        self._come_to_rest([])  # before any peer sets a flag anew

    def _come_to_rest(self, slots: Sequence[Slot]) -> None:
        """Waits until no rank's device has work left, ending its waits for what no peer will send in these slots.

        What the ranks exchanged before one of them raised is whole: a peer's flags are set for it only once its device
        is at rest. All that it was to send has then come, and what is still waited for, it has never begun to send. The
        rank that came least far waits for nothing, then the next one for none but that one, and so on.
        """

        def release(peers: Sequence[int]) -> None:
            for slot in slots:
                slot.release(peers)

        axis = self._axis
        reasons = self._interconnect.come_to_rest(axis, release)
        if failed := {rank: reason for rank, reason in zip(axis.ranks, reasons, strict=True) if reason is not None}:
            raise RuntimeError(
                f"`reset` cannot put the ranks {axis.ranks} of the {axis.name} axis back in step: "
                + "; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
                + ". End the processes, and go on from a checkpoint."
            )

    def _keep_common(self, everyone: Sequence[Any]) -> None:
        """Drops what was agreed on or allocated by some ranks only, given the sizes and capacities of all."""
        sizes, capacities = zip(*everyone, strict=True)
        self._sizes = {shape: known for shape, known in self._sizes.items() if all(known in each for each in sizes)}
        self._layouts.clear()  # found anew from sizes
        for slots, of_ranks in zip(self._slots.values(), zip(*capacities, strict=True), strict=True):
            at_all = zip(*of_ranks, strict=False)  # the last ones may be there on some ranks only
            slots[:] = [slot for slot, mine in zip(slots, at_all, strict=False) if len(set(mine)) == 1]

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Pushes the pieces and copies those of the peers out of their slot."""
        if axis.ranks != self._axis.ranks:
            return super().exchange(message, send, receive, axis)
        if torch.compiler.is_compiling():
            raise NotImplementedError("Compiled code calls transport='symmetric' by ops, which split models have.")
        return self.wait(self.all_to_all(message, send, receive, axis))

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """Starts the pushes."""
        if axis.ranks != self._axis.ranks:
            return super().all_to_all(message, send, receive, axis)
        exchange = self._open(message, send, receive)
        # Every rank starts with another peer, so that no link is shared.
        exchange.send(*((axis.rank + step) % axis.size for step in range(1, axis.size + 1)))
        return exchange

    def wait(self, pending: Any, join: Join | None = None) -> Tensor:
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
        """See `Transport` and `open`; no piece is copied but from rank to rank."""
        if axis.ranks != self._axis.ranks:
            return super().begin(like, send, receive, axis)
        place = self._place(PulledExchange, self._layout(PulledExchange, like.itemsize, send, receive))
        return PulledExchange(*place, like.new_empty(sum(receive)), receive)

    def begin_columns(self, columns: Tensor, lengths: Sequence[int], widths: Sequence[int], axis: Axis) -> Any:
        """See `Transport` and `open`; columns are copied straight to where they are read."""
        if axis.ranks != self._axis.ranks:
            return super().begin_columns(columns, lengths, widths, axis)
        check_columns(columns, lengths, widths, axis)
        # The ranks know all sizes, and need not tell them.
        each = columns.shape[1] * columns.itemsize
        key = JoinedExchange, tuple(lengths), tuple(widths), each
        if (layout := self._layouts.get(key)) is None:
            sizes = [[length * width * each for length in lengths] for width in widths]
            layout = self._layouts[key] = JoinedExchange.layout(sizes)
        exchange = JoinedExchange(*self._place(JoinedExchange, layout), columns.detach(), lengths, widths)
        exchange.start()
        return exchange

    def _open(self, message: Tensor, send: Sequence[int], receive: Sequence[int]) -> SymmetricExchange:
        if not message.is_contiguous() or message.shape != (sum(send),):
            raise ValueError(
                f"A message must be contiguous and have the {sum(send)} elements of its pieces; this has the shape "
                f"{tuple(message.shape)}, strides {message.stride()}."
            )
        place = self._place(PushedExchange, self._layout(PushedExchange, message.itemsize, send, receive))
        return PushedExchange(*place, message.detach().split(list(send)))

    def _layout(
        self, way: type[SymmetricExchange], itemsize: int, send: Sequence[int], receive: Sequence[int]
    ) -> SlotLayout:
        """Where the pieces of an exchange lie on their way."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        shape = tuple(n * itemsize for n in send), tuple(n * itemsize for n in receive)
        layout = self._layouts.get((way, *shape))
        if layout is None:
            layout = self._layouts[way, *shape] = way.layout(self._agree(*shape))
        return layout

    def _place(self, way: type[SymmetricExchange], layout: SlotLayout) -> tuple[Interconnect, Slot, SlotLayout]:
        """The first slot that is free; which one hence depends on nothing but what is pending."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        slots = self._slots[way]
        number = next((number for number, slot in enumerate(slots) if slot.pending is None), len(slots))
        if number == self._most:
            raise RuntimeError(
                f"{number} exchanges of the {self._axis.name} axis are pending, and no slot is free for another: "
                "finish the oldest first, or create the transport with more slots."
            )
        if number == len(slots) or slots[number].capacity < layout.capacity:
            self._has_begun = True
            slots[number : number + 1] = [Slot(self._axis, self._interconnect, number, layout.capacity)]
            self._known.add(slots[number])
        return self._interconnect, slots[number], layout

    def _agree(self, send: tuple[int, ...], receive: tuple[int, ...]) -> list[list[int]]:
        """Returns ``sizes[s][r]``, the bytes that go from rank s to rank r."""
        axis = self._axis
        if (send, receive) in self._sizes:
            return self._sizes[send, receive]
        sizes = self._interconnect.agree(send, axis, "to tell the sizes of a message of a new shape")
        coming = tuple(theirs[axis.rank] for theirs in sizes)
        if coming != receive:
            raise RuntimeError(
                f"The ranks {axis.ranks} of the {axis.name} axis disagree: they send {coming} bytes to rank "
                f"{axis.ranks[axis.rank]}, which expects {receive}."
            )
        self._sizes[send, receive] = sizes
        return sizes
