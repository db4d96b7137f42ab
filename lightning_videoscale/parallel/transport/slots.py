"""Where messages lie in the memory of the `symmetric` transport, and which flags guard them.

`SlotLayout`  the places of all ranks' pieces within a slot, for one shape of message
`Arena`       the slots, and for each slot and peer the flags *arrived* and *released*
"""

from __future__ import annotations

from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport.symmetric_memory import Fabric, Memory

_ALIGNMENT = 256  # bytes; more than any vectorised copy asks of a piece's first byte


class SlotLayout:
    """Where the pieces of one shape of message lie in the slots of all ranks.

    Args:
        sizes: ``sizes[p][h]`` bytes lie in the slot of rank h, and come from or go to rank p.
        own: Whether a rank's own piece lies there, too, which does not travel.

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


class Arena:
    """The slots and flags of an axis, alike on all its ranks; collective to create.

    Attributes:
        axis: The ranks.
        capacity: Bytes of a slot.
        memory: Holds slots and flags.
        pending: By slot, this rank's exchange that has it; kept here, so that what it writes to is not freed before.
    """

    def __init__(self, axis: Axis, fabric: Fabric, slots: int, capacity: int) -> None:
        self.axis = axis
        self.capacity = capacity
        self.memory: Memory = fabric.allocate(slots * capacity, 2 * slots * axis.size, axis)
        self.pending: dict[int, object] = {}
        self._slots = slots
        self.memory.flags[slots * axis.size :] = 1  # no slot has been written to

    def begin(self, exchange: object) -> int:
        """Gives an exchange the first free slot, which hence depends on nothing but what is pending.

        Raises:
            RuntimeError: If none is free.
        """
        slot = next((slot for slot in range(self._slots) if slot not in self.pending), None)
        if slot is None:
            raise RuntimeError(
                f"{self._slots} exchanges of the {self.axis.name} axis are pending, and no slot is free for another: "
                "finish the oldest first, or create the transport with more slots."
            )
        self.pending[slot] = exchange
        return slot

    def finish(self, slot: int) -> None:
        """Takes a slot back whose exchange this rank has finished."""
        del self.pending[slot]

    def release(self) -> None:
        """Sets all flags of this rank, by no kernel: loading one may wait for a device that waits for a flag."""
        for flag in range(len(self.memory.flags)):
            self.memory.signal(self.axis.rank, flag)

    def restart(self) -> None:
        """Forgets all exchanges, on the current stream; no rank's device may have one on its way."""
        self.pending.clear()
        self.memory.flags[: self._slots * self.axis.size] = 0
        self.memory.flags[self._slots * self.axis.size :] = 1

    def whole(self, slot: int, nbytes: int, holder: int) -> Tensor:
        """The first bytes of a slot, in the holder's memory."""
        return self.memory.buffers[holder][slot * self.capacity :][:nbytes]

    def piece(self, slot: int, layout: SlotLayout, partner: int, holder: int) -> Tensor:
        """The bytes of one piece, in the holder's memory."""
        start = slot * self.capacity + layout.offsets[partner][holder]
        return self.memory.buffers[holder][start : start + layout.sizes[partner][holder]]

    def arrived(self, slot: int, sender: int) -> int:
        """The flag of the reader that the sender sets when its piece lies in the slot."""
        return slot * self.axis.size + sender

    def released(self, slot: int, reader: int) -> int:
        """The flag of the sender that the reader sets when it has copied the piece out of the slot."""
        return (self._slots + slot) * self.axis.size + reader
