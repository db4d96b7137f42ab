"""What is known of each kind of calls of a network: `Kind`, and all of them, `Kinds`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch

from lightning_videoscale.graphs.capture import CapturedPass
from lightning_videoscale.graphs.snapshot import Snapshot
from lightning_videoscale.parallel.context import SplitRecord

_MOST = 512  # more than buckets make


@dataclass
class Kind:
    """What is known of the calls of one key.

    Attributes:
        calls: How many there were.
        seen: The network as it was when one was inspected; None if none was since the network was last changed.
        objection: Why they stay eager.
        bytes: Memory that a pass keeps for backward.
        draws: Whether a forward draws random numbers.
        took: Memory by which its capture has made the pool larger.
        waits: The host's seconds for a forward, and the events around it on the device.
        replayed: The events around a replay of a forward, until it is compared with the eager one.
        captured: The pass, once there is one.
        record: How the pass was split.
    """

    calls: int = 0
    seen: Snapshot | None = None
    objection: str | None = None
    bytes: int = 0
    draws: bool = False
    took: int = 0
    waits: tuple[float, torch.cuda.Event, torch.cuda.Event] | None = None
    replayed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    captured: CapturedPass | None = None
    record: SplitRecord | None = None


class Kinds:
    """The kinds of calls that there were.

    An argument that is another number in each call makes each call a kind of its own. So of many kinds, those that came
    once are forgotten: by all ranks in the same call, as each has as many.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Kind] = {}
        self._states: dict[Hashable, Hashable] = {}
        self._snapshots: dict[Hashable, Snapshot] = {}  # the last one by state

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._by_key.values())

    def find(self, key: Hashable) -> Kind:
        """Returns the kind of a key, a new one if there was none."""
        kind = self._by_key.get(key)
        if kind is None:
            if len(self._by_key) >= _MOST:
                self._by_key = {known: each for known, each in self._by_key.items() if each.calls > 1}
            kind = self._by_key[key] = Kind()
        return kind

    def one_of(self, *state: Hashable) -> Hashable:
        """Returns the same object for an equal state, since every key holds it, and it is long."""
        return self._states.setdefault(state, state)

    def note(self, kind: Kind, state: Hashable, snapshot: Snapshot) -> None:
        """Notes what a kind was inspected with: one snapshot for all, as long as the network is what it was."""
        known = self._snapshots.get(state)
        if known is None or known.difference() is not None:
            known = self._snapshots[state] = snapshot
        kind.seen = known

    def let_go(self) -> None:
        """Forgets what was captured and inspected."""
        for kind in self:
            kind.captured, kind.objection, kind.seen = None, None, None
        self._snapshots.clear()

    def clear(self) -> None:
        """Forgets all."""
        self._by_key.clear()
