"""Exchanges between the hosts of ranks, over a store.

`HostExchanges`    of a few numbers
`HostExchange`     one of those
`RendezvousStore`  of the handles of memory, whatever other groups each rank has set up before
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but missing from the type hints

from lightning_videoscale.parallel.mesh import Axis


class HostExchanges:
    """What the ranks of an axis tell each other over the host's network, since the devices may be busy for long.

    Ranks number their exchanges, and take part in those of one number together.
    """

    def __init__(self, token: str, timeout: timedelta) -> None:
        self._token = token
        self._timeout = timeout
        self._generation = self._number = 0

    def name(self, axis: Axis) -> str:
        """A name that the ranks of the axis share until `renew`."""
        return f"{self._token}/{self._generation}/{'-'.join(map(str, axis.ranks))}"

    def renew(self) -> None:
        """Counts anew, under another name, so that ranks agree again, however many exchanges each has begun."""
        self._generation += 1
        self._number = 0

    def agree(self, told: Any, axis: Axis, store: Store, purpose: str) -> list[Any]:
        """Returns what each rank of the axis tells, anything that JSON can hold, by rank.

        Raises:
            TimeoutError: With the ranks that did not come.
        """
        exchange = self.begin(axis, store, purpose)
        exchange.tell(told)
        return exchange.hear()

    def begin(self, axis: Axis, store: Store, purpose: str) -> HostExchange:
        """Begins an exchange in which each rank tells something once it can."""
        self._number += 1
        return HostExchange(axis, PrefixStore(f"{self.name(axis)}/{self._number}", store), self._timeout, purpose)


class HostExchange:
    """An exchange that has begun on this rank; see `HostExchanges`."""

    def __init__(self, axis: Axis, store: Store, timeout: timedelta, purpose: str) -> None:
        self._axis, self._store = axis, store
        self._timeout, self._purpose = timeout, purpose
        self._missing = list(range(axis.size))

    def tell(self, told: Any) -> None:
        """Tells the others."""
        self._store.set(str(self._axis.rank), json.dumps(told))

    def have_told(self) -> list[int]:
        """The positions in the axis that have told something so far; does not wait."""
        self._missing = [rank for rank in self._missing if not self._store.check([str(rank)])]
        return [rank for rank in range(self._axis.size) if rank not in self._missing]

    def hear(self) -> list[Any]:
        """Returns what each rank tells, by rank, and waits for it.

        Raises:
            TimeoutError: With the ranks that did not come.
        """
        axis = self._axis
        deadline = time.monotonic() + self._timeout.total_seconds()
        while len(self.have_told()) < axis.size:
            if time.monotonic() > deadline:
                missing = [axis.ranks[rank] for rank in self._missing]
                raise TimeoutError(
                    f"Rank {axis.ranks[axis.rank]} waited {self._timeout} for ranks {missing} of the {axis.name} axis "
                    f"{self._purpose}. See what those ranks printed first; all ranks must call the model equally often "
                    "and with the same shapes, and all of them must call `reset` if one does."
                )
            time.sleep(0.0005)
        return [json.loads(self._store.get(str(rank))) for rank in range(axis.size)]


class RendezvousStore(Store):
    """A store by which the ranks of one axis exchange the handles of memory.

    Torch numbers the exchanges of a process, those of all its groups together, and its keys are ``.../number/rank``.
    Ranks whose other groups exchanged more often, or less, would hence wait for each other under different keys. Here
    the number is that of the axis' own exchanges.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._number = ""
        self._exchanges = 0

    def set(self, key: str, value: str) -> None:  # torch has bytes for the value when it calls this
        """Sets a key."""
        self._store.set(self._of_axis(key), value)

    def get(self, key: str) -> bytes:
        """Returns a key's value."""
        return self._store.get(self._of_axis(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        self._store.wait([self._of_axis(key) for key in keys], timeout or self._timeout)

    def _of_axis(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        if number != self._number:
            self._number = number
            self._exchanges += 1
        return f"{name}/{self._exchanges}/{rank}"
