"""What the graphs of a network may take of a device's memory, and what they take: `GraphMemory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_ROOM = 1.5  # times what a pass keeps, for all that it takes while it runs


class GraphMemory:
    """Memory of the pool in which a network's graphs lie.

    The pool of several passes is hardly larger than that of the largest, if that one came first. Else it may be as
    large as all of them, since what is free between a smaller one's tensors is too small for the next.

    Args:
        share: Of a device's memory that graphs may take.

    Attributes:
        bytes: Taken so far.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.bytes = 0

    def why_too_large(self, needed: int, device: torch.device) -> str | None:
        """Why a pass that needs so many bytes is not captured, or None; makes room for it."""
        allowed = self._allowed(device)
        if needed > allowed:
            return f"a graph needs {_gib(needed)} for activations and gradients, and {self._limit(allowed)}"
        if torch.cuda.mem_get_info(device)[0] < _ROOM * needed:
            torch.cuda.empty_cache()  # the pool of graphs takes nothing of what the allocator keeps for others
        return None

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[Callable[[], int]]:
        """Counts what the process takes inside, unless that fails: its memory is then nobody's.

        Yields:
            What was counted, once it has ended.
        """
        before, bytes_before = torch.cuda.memory_reserved(device), self.bytes
        yield lambda: self.bytes - bytes_before
        self.bytes += max(torch.cuda.memory_reserved(device) - before, 0)

    def excess(self, device: torch.device) -> str | None:
        """What the graphs take, if that is more than they may; else None."""
        allowed = self._allowed(device)
        return f"they take {_gib(self.bytes)}, and {self._limit(allowed)}" if self.bytes > allowed else None

    def _allowed(self, device: torch.device) -> float:
        return self._share * torch.cuda.get_device_properties(device).total_memory

    def _limit(self, allowed: float) -> str:
        return f"graphs_max_memory={self._share} allows {_gib(allowed)}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
