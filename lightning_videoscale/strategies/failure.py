"""When a rank fails: every rank says what failed first, and the launching process leaves no other behind.

A rank that fails takes its connections down, and its peers then report a closed connection, often as the last thing on
the screen. The first error is what the user needs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints

_KEY = "first_error"


class FirstError:
    """Remembers, for all ranks of a job, which error came first; collective to create.

    Args:
        host: Address of rank 0, as all ranks reach it.
    """

    def __init__(self, host: str) -> None:
        rank = dist.get_rank()
        timeout = timedelta(seconds=30)
        # A store of its own: torch offers no public access to the one that the process group was started with.
        store = TCPStore(host, 0, is_master=True, timeout=timeout) if rank == 0 else None
        port = [store.port if store is not None else 0]
        dist.broadcast_object_list(port)
        self._store = store if store is not None else TCPStore(host, port[0], is_master=False, timeout=timeout)
        self._rank = rank

    def report(self, exception: BaseException) -> bool:
        """Notes this rank's error, or learns that another came first and adds it to the exception.

        Args:
            exception: What this rank failed with; shows the first error at its end when printed.

        Returns:
            Whether this rank's error is the first.
        """
        mine = f"rank {self._rank}: {type(exception).__name__}: {exception}"
        try:
            first = self._store.compare_set(_KEY, "", mine).decode()
        except dist.DistError:
            exception.add_note("Rank 0 was gone before this error: look for what it printed first.")
            return False
        if first == mine:
            return True
        exception.add_note(f"The first error of the job was on {first}")
        return False


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Ends processes, after waiting ``grace`` seconds in which they may end by themselves."""
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
