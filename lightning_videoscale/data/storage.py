"""Bytes of shards, by range: local files through ``pread``, everything else through fsspec.

A read either returns exactly what was asked for or raises a `ShardError`. Remote reads that fail are tried again after
growing pauses, since networks come back; what cannot come back (a missing object, a refused permission) is not.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import sync  # type: ignore[import-untyped]

from lightning_videoscale.data.shards import ByteRange, ShardError, is_remote

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_WHOLE = 32 * 2**20
"""Members up to this many bytes are read at once; longer ones in blocks, so that a long video needs little memory."""
_BLOCK = 2**20
_HEADER_BLOCK = 2**18
_NEIGHBOURS = 2**16
"""Remote ranges that lie closer together than this many bytes are fetched as one: a request costs more than they do."""
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_TIMEOUT = 120.0
_PERMANENT_STATUS = frozenset({400, 401, 403, 404, 405, 410, 416})


class ShardStat(NamedTuple):
    """Bytes of a shard, and a mark that changes when it is written again (modification time, ETag)."""

    size: int
    stamp: str


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


def open_shard(url: str, pauses: Sequence[float] = _PAUSES) -> Shard:
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
            ShardError: If the file ends before, or the disk fails.
        """
        try:
            data = os.pread(self._descriptor, at.size, at.offset)
        except OSError as error:
            raise ShardError(f"The shard {self.url} cannot be read any more: {error}.") from error
        if len(data) != at.size:
            raise ShardError(f"The shard {self.url} ends before byte {at.offset + at.size}; it was cut after indexing.")
        return data

    def read_all(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads several ranges, each on its own."""
        return [self.read(at) for at in ranges]

    def __del__(self) -> None:
        # With the last reference, so that a thread that still reads keeps it open.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class RemoteShard:
    """An object behind a URL. Holds no connection, so it may cross into other processes and threads."""

    def __init__(self, url: str, pauses: Sequence[float] = _PAUSES) -> None:
        self.url = url
        self._pauses = pauses
        self._file_system()

    def stat(self) -> ShardStat:
        """Size, and whatever the server says about the version.

        Raises:
            ShardError: If the object is missing or cannot be reached, or the server does not tell its size.
        """
        fs, path = self._file_system()
        info = self._retried("size", lambda: _run(fs, "info", path))
        if not isinstance(info.get("size"), int):
            raise ShardError(f"The server of {self.url} does not tell its size; serve it with a Content-Length.")
        stamps = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
        return ShardStat(info["size"], next((str(info[name]) for name in stamps if info.get(name)), ""))

    def read(self, at: ByteRange) -> bytes:
        """Reads exactly this range.

        Raises:
            ShardError: If it cannot be had after all attempts, or the server sends something else.
        """
        if not at.size:
            return b""
        return self._retried(f"bytes {at.offset} to {at.offset + at.size}", lambda: self._fetch(at))

    def read_all(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads several ranges, neighbours in one request."""
        content: dict[ByteRange, bytes] = {}
        for group in _neighbours(ranges):
            start = group[0].offset
            data = self.read(ByteRange(start, max(at.offset + at.size for at in group) - start))
            content |= {at: data[at.offset - start : at.offset - start + at.size] for at in group}
        return [content[at] for at in ranges]

    def _fetch(self, at: ByteRange) -> bytes:
        fs, path = self._file_system()
        data: bytes = _run(fs, "cat_file", path, start=at.offset, end=at.offset + at.size)
        if len(data) > at.size:
            raise _NoRangesError(
                f"The server of {self.url} ignores byte ranges (it sent {len(data)} bytes instead of {at.size}); "
                "use one that supports them, or copy the shards."
            )
        if len(data) < at.size:
            raise EOFError(f"{len(data)} of {at.size} bytes came")
        return data

    def _file_system(self) -> tuple[Any, str]:
        # Made anew for every read: fsspec keeps one per process and thread, which is what makes forks safe.
        try:
            fs, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ShardError(f"The shard {self.url} cannot be read: {error}.") from error
        return fs, path

    def _retried(self, what: str, attempt: Callable[[], _T]) -> _T:
        for pause in (*self._pauses, None):
            try:
                return attempt()
            except _NoRangesError:
                raise
            # Every file system raises errors of its own making for a connection that broke.
            except Exception as error:
                cause = _cause(error)
                reason = f"{type(cause).__name__}: {cause}"
                if isinstance(cause, FileNotFoundError | PermissionError) or _status(cause) in _PERMANENT_STATUS:
                    raise ShardError(f"The shard {self.url} cannot be read ({reason}).") from error
                if pause is None:
                    raise ShardError(
                        f"The shard {self.url} cannot be read after {len(self._pauses) + 1} attempts at its {what} "
                        f"({reason})."
                    ) from error
                _log.warning("%s of the shard %s: %s. Trying again in %s s.", what, self.url, reason, pause)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


class _NoRangesError(ShardError):
    pass


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


def _neighbours(ranges: Sequence[ByteRange]) -> list[list[ByteRange]]:
    groups: list[list[ByteRange]] = []
    for at in sorted(ranges):
        end = groups[-1][-1].offset + groups[-1][-1].size if groups else -_NEIGHBOURS
        if groups and at.offset - end <= _NEIGHBOURS and at.offset + at.size - groups[-1][0].offset <= _WHOLE:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups


def _run(fs: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    if fs.async_impl:
        return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=_TIMEOUT, **kwargs)
    return getattr(fs, method)(*args, **kwargs)


def _cause(error: BaseException) -> BaseException:
    # fsspec says "not found" of whatever kept it from asking for a size over HTTP.
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else None
