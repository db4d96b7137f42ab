"""How long reads take, beside what is made of the bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_videoscale.data.shards.location import ByteRange, ShardStat
from lightning_videoscale.data.shards.storage import Shard

_Result = TypeVar("_Result")


class ReadingTime(threading.local):
    """Seconds that a thread has waited for storage so far."""

    seconds = 0.0

    def of(self, act: Callable[[], _Result]) -> _Result:
        """Returns what ``act`` returns, and adds what it takes, also where it raises."""
        begin = time.perf_counter()
        try:
            return act()
        finally:
            self.seconds += time.perf_counter() - begin


class TimedShard:
    """A shard whose reads add to a thread's `ReadingTime`.

    Args:
        shard: The shard.
        time: What they add to.
    """

    def __init__(self, shard: Shard, time: ReadingTime) -> None:
        self.url = shard.url
        self._shard = shard
        self._time = time

    def stat(self) -> ShardStat:
        """Size and version of the shard as it is now."""
        return self._time.of(self._shard.stat)

    def read(self, at: ByteRange) -> bytes:
        """Reads exactly this range."""
        return self._time.of(lambda: self._shard.read(at))

    def read_all(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads several ranges."""
        return self._time.of(lambda: self._shard.read_all(ranges))
