"""Where an epoch's data end on one rank before they end on another: `EpochEnds`.

Such a rank goes on to a validation, a checkpoint or the end of the run. Its next collective would pair with the
all-reduce of gradients that its peers wait in: with NCCL the result is undefined. So ranks wait for each other first,
over the store, and a peer that has begun another batch is named at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints

from lightning_videoscale.compat.lightning.training_loop import Begun
from lightning_videoscale.strategies.failures.answering_store import AnsweringStore

_Store = TCPStore | AnsweringStore


class EpochEnds:
    """All ranks have trained the last batch of an epoch before any goes on.

    Args:
        rank: This rank.
        size: Number of ranks.
        begun: Returns how far this rank has come; called by any thread.
    """

    def __init__(self, rank: int, size: int, begun: Callable[[], Begun]) -> None:
        self._rank, self._size, self._begun = rank, size, begun
        self._passed = 0  # ends of epochs; not the epoch's number, as `LearningRateFinder` has one trained twice

    def look(self, store: _Store) -> None:
        """Tells if this rank has begun a batch that one which waits does not have; called by a thread each second."""
        key, begun = self._key(), self._begun()
        if store.check([f"{key}/first"]) and begun.of_run > int(store.get(f"{key}/first")):
            store.compare_set(f"{key}/beyond", "", str(self._rank))

    def wait_for_all(self, store: _Store, timeout: timedelta) -> None:
        """Waits until all ranks are at the end of the epoch.

        Raises:
            RuntimeError: If a rank has begun a batch that this one does not have, does not come, or has failed.
        """
        epoch, batches, of_run = self._begun()
        key = self._key()
        store.compare_set(f"{key}/first", "", str(of_run))
        store.set(f"{key}/here/{self._rank}", "")
        arrived, start, pause = store.add(f"{key}/arrived", 1), time.monotonic(), 1e-3
        here = f"Epoch {epoch} has ended on rank {self._rank} after {batches} batches"
        while arrived < self._size:
            if store.check(["first_error"]):
                raise RuntimeError(f"{here}, and another rank has failed.")
            if store.check([f"{key}/beyond"]):
                raise RuntimeError(
                    f"{here}, and rank {int(store.get(f'{key}/beyond'))} has begun another. All ranks need equally "
                    f"many: give each as many samples, set limit_train_batches={batches}, or let all ranks agree "
                    "before one sets trainer.should_stop (trainer.strategy.reduce_boolean_decision)."
                )
            if time.monotonic() - start > timeout.total_seconds():
                missing = [rank for rank in range(self._size) if not store.check([f"{key}/here/{rank}"])]
                raise RuntimeError(f"{here}; rank(s) {missing} did not come within {timeout.total_seconds():g} s.")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            arrived = store.add(f"{key}/arrived", 0)
        self._passed += 1

    def _key(self) -> str:
        """Of the end that comes next, the same on all ranks."""
        return f"end of an epoch/{self._passed}"
