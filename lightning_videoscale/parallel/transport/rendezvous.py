"""Where ranks meet to exchange the handles of memory, whatever other groups each of them has met before."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but missing from the type hints


class RendezvousStore(Store):
    """A store in which the ranks of one axis find each other to exchange the handles of memory.

    Torch numbers the meetings of a process, those of all its groups together, and its keys are ``.../number/rank``.
    Ranks whose other groups met more often, or less, would hence wait for each other under different keys. Here the
    number is that of the axis' own meetings.

    Args:
        store: Where the axis' keys really are.
        timeout: How long to wait for a peer.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._number = ""
        self._meetings = 0

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
            self._meetings += 1
        return f"{name}/{self._meetings}/{rank}"
