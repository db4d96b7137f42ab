"""Where messages lie in the memory of the `symmetric` transport, and which flags guard them.

`SlotLayout`  the places of all ranks' pieces within a slot, for one shape of message
`Slot`        memory for one exchange at a time, and for each peer the flags *arrived* and *released*
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport.symmetric_memory import Interconnect, Memory

_ALIGNMENT = 256  # bytes; more than any vectorised copy asks of a piece's first byte


class SlotLayout:
    """Where the pieces of one shape of message lie in the slots of all ranks.

    Args:
        sizes: ``sizes[p][h]`` bytes lie in the slot of rank h, and come from or go to rank p.
        own: Whether a rank's own piece lies there, too, which is not sent.

    Attributes:
        sizes: As given.
        offsets: ``offsets[p][h]`` is the first byte of that piece in h's slot.
        capacity: Bytes that a slot must have, on the rank that holds most.
    """

    def __init__(self, sizes: list[list[int]], *, own: bool = False) -> None:
        self.sizes = sizes
        self.offsets = [[0] * len(sizes) for _ in sizes]
        self.capacity = 0
        for holder in range(len(sizes)):
            end = 0
            for partner in range(len(sizes)):
                self.offsets[partner][holder] = end
                if own or partner != holder:
                    end += -(-sizes[partner][holder] // _ALIGNMENT) * _ALIGNMENT
            self.capacity = max(self.capacity, end)


class Slot:
    """Memory and flags, alike on all ranks of an axis; collective to create.

    Attributes:
        axis: The ranks.
        number: That says in messages which of several it is.
        capacity: Bytes of data.
        memory: Holds data and flags.
        pending: This rank's exchange that has it, or None; kept here, so that what it writes to is not freed before.
    """

    def __init__(self, axis: Axis, interconnect: Interconnect, number: int, capacity: int) -> None:
        self.axis = axis
        self.number = number
        self.capacity = capacity
        self.memory: Memory = interconnect.allocate(capacity, 2 * axis.size, axis)
        self.pending: object | None = None
        self.memory.flags[axis.size :] = 1  # it has not been written to

    def release(self, peers: Sequence[int]) -> None:
        """Sets this rank's flags for these peers, by no kernel: loading one may wait for a device that waits."""
        for peer in peers:
            self.memory.signal(self.axis.rank, self.arrived(peer))
            self.memory.signal(self.axis.rank, self.released(peer))

    def restart(self) -> None:
        """Forgets the exchange, on the current stream; no rank's device may have one on its way."""
        self.pending = None
        self.memory.flags[: self.axis.size] = 0
        self.memory.flags[self.axis.size :] = 1

    def whole(self, nbytes: int, holder: int) -> Tensor:
        """The first bytes, in the holder's memory."""
        return self.memory.buffers[holder][:nbytes]

    def piece(self, layout: SlotLayout, partner: int, holder: int) -> Tensor:
        """The bytes of one piece, in the holder's memory."""
        start = layout.offsets[partner][holder]
        return self.memory.buffers[holder][start : start + layout.sizes[partner][holder]]

    def arrived(self, sender: int) -> int:
        """The flag of the reader that the sender sets when its piece lies here."""
        return sender

    def released(self, reader: int) -> int:
        """The flag of the sender that the reader sets when it has copied the piece out."""
        return self.axis.size + reader
