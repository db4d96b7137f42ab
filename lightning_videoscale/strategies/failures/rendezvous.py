"""Where ranks wait for each other in users' code, also after a run: a wait that says who is missing, and what to do."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_videoscale.compat.torch.distributed import store_of

_WARN = 20.0  # s after which a rank that waits says for whom
_KEY = "lightning_videoscale/rendezvous"

_log = logging.getLogger(__name__)


class Rendezvous:
    """All ranks of the job, which come to the same call; needs no process group but the store of the default one."""

    def __init__(self, call: str, timeout: timedelta) -> None:
        self._call, self._timeout = call, timeout.total_seconds()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = store_of(dist.group.WORLD)

    def wait(self, error: BaseException | None = None) -> None:
        """Waits until all ranks are here, and has them raise the error, if any, that this rank failed with.

        Raises:
            RuntimeError: If a rank does not come, has left the job, or comes with an error.
        """
        number = self._store.add(f"{_KEY}/{self._rank}", 0) + 1  # counts over all of the job
        if error is not None:
            self._store.set(f"{_KEY}/error/{number}/{self._rank}", f"{type(error).__name__}: {error}")
            self._store.add(f"{_KEY}/errors/{number}", 1)
        self._store.add(f"{_KEY}/{self._rank}", 1)  # behind the error: who sees this rank here looks for one
        missing = [rank for rank in range(self._size) if rank != self._rank]
        start, warned, pause = time.monotonic(), False, 0.005
        while missing := [rank for rank in missing if self._store.add(f"{_KEY}/{rank}", 0) < number]:
            waited = time.monotonic() - start
            gone = [rank for rank in missing if self._store.check([f"{_KEY}/left/{rank}"])]
            if gone or waited > self._timeout:
                self._store.add(f"{_KEY}/{self._rank}", -1)  # it did not take place
                raise RuntimeError(
                    f"rank {self._rank} is in {self._call}, and rank(s) {gone or missing} "
                    + ("ended without it" if gone else f"did not come within {self._timeout:g} s")
                    + f". {self._advice()}"
                )
            if waited > _WARN and not warned:
                warned = True
                _log.warning(f"rank {self._rank} waits in {self._call} for rank(s) {missing}. {self._advice()}")
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        if error is None and self._store.add(f"{_KEY}/errors/{number}", 0):
            failed = [r for r in range(self._size) if self._store.check([f"{_KEY}/error/{number}/{r}"])]
            said = self._store.get(f"{_KEY}/error/{number}/{failed[0]}").decode()
            raise RuntimeError(f"rank {failed[0]} failed in {self._call}: {said}")

    def _advice(self) -> str:
        return (
            f"All ranks must call {self._call}, as each holds a share of the parameters: call it outside of "
            "`if trainer.is_global_zero:` and of rank_zero_only; rank 0 alone writes."
        )


def note_exits() -> None:
    """Lets this rank say, when its process ends, that it comes to no other."""
    store, rank = store_of(dist.group.WORLD), dist.get_rank()

    def leave() -> None:
        with contextlib.suppress(Exception):  # rank 0 may have taken the store with it
            store.set(f"{_KEY}/left/{rank}", "")

    atexit.register(leave)
