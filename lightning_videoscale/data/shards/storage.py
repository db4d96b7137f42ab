"""Bytes of shards, by range: local files through ``pread``, everything else through fsspec.

A read either returns exactly what was asked for or raises a `ShardError`.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol, TypeVar

from lightning_videoscale.data.shards.errors import ShardError, UnreachableError
from lightning_videoscale.data.shards.location import ByteRange, ShardStat, is_remote
from lightning_videoscale.data.shards.remote import PAUSES, RemoteShard

_WHOLE = 32 * 2**20
"""Members up to this many bytes are read at once; longer ones in blocks, so that a long video needs little memory."""
_BLOCK = 2**20
_HEADER_BLOCK = 2**18

_Result = TypeVar("_Result")


class Shard(Protocol):
    """One shard to read from."""

    url: str

    def stat(self) -> ShardStat:
        """Size and version of the shard as it is now."""
        ...

    def read(self, at: ByteRange) -> bytes:
        """Reads exactly this range."""
        ...

    def read_all(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads several ranges."""
        ...


def open_shard(url: str, pauses: Sequence[float] = PAUSES) -> Shard:
    """Opens a shard for reading.

    Args:
        url: A local path, or a URL that fsspec knows.
        pauses: Seconds between attempts at a remote read.

    Raises:
        ShardError: If the file cannot be opened, or the package that reads such URLs is missing.
    """
    return RemoteShard(url, pauses) if is_remote(url) else LocalShard(url)


class LocalShard:
    """A file. Reads name their position, so threads and forked processes may share it."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._descriptor = os.open(url, os.O_RDONLY)
        except OSError as error:
            raise ShardError(f"The shard {url} cannot be read: {error}.") from error

    def stat(self) -> ShardStat:
        """Size and modification time."""
        stat = os.fstat(self._descriptor)
        return ShardStat(stat.st_size, str(stat.st_mtime_ns))

    def read(self, at: ByteRange) -> bytes:
        """Reads exactly this range.

        Raises:
            ShardError: If the file ends before.
            UnreachableError: If the disk fails.
        """
        blocks: list[bytes] = []
        done = 0
        while done < at.size:  # Linux reads no more than 2 GiB at once
            try:
                block = os.pread(self._descriptor, at.size - done, at.offset + done)
            except OSError as error:
                raise UnreachableError(f"The shard {self.url} cannot be read any more: {error}.") from error
            if not block:
                raise ShardError(
                    f"The shard {self.url} ends before byte {at.offset + at.size}; it was cut after indexing."
                )
            blocks.append(block)
            done += len(block)
        return b"".join(blocks)

    def read_all(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads several ranges, each on its own."""
        return [self.read(at) for at in ranges]

    def __del__(self) -> None:
        # With the last reference, so that a thread that still reads keeps it open.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _Window(io.RawIOBase):
    """Part of a shard as a file."""

    def __init__(self, shard: Shard, at: ByteRange) -> None:
        self._shard = shard
        self._at = at
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._at.size}[whence]
        if base + offset < 0:
            raise OSError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._at.size - self._position))
        buffer[:size] = self._shard.read(ByteRange(self._at.offset + self._position, size))
        self._position += size
        return size


def open_member(shard: Shard, at: ByteRange) -> BinaryIO:
    """Opens a member as a file of its own, whose reads raise `ShardError`. Long members are read in blocks."""
    if at.size <= _WHOLE:
        return io.BytesIO(shard.read(at))
    return io.BufferedReader(_Window(shard, at), _BLOCK)


def open_whole(shard: Shard, size: int) -> BinaryIO:
    """Opens a shard as a file, to look at the headers that are spread over it."""
    return io.BufferedReader(_Window(shard, ByteRange(0, size)), _HEADER_BLOCK if is_remote(shard.url) else 4096)


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
    """A shard whose reads add to a thread's `ReadingTime`."""

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
