"""Shards behind URLs, through fsspec.

Reads that fail are tried again after growing pauses, since networks come back. An answer that sounds final, such as a
refused permission, may be a server's bad moment, so it is asked for again, but not for long. Only what is missing is
believed at once.
"""

from __future__ import annotations

import logging
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import sync  # type: ignore[import-untyped]
from fsspec.utils import merge_offset_ranges  # type: ignore[import-untyped]

from lightning_videoscale.data.shards.errors import ShardError, UnreachableError
from lightning_videoscale.data.shards.location import ByteRange, ShardStat

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between attempts."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NEIGHBOURS = 2**16
"""Ranges that lie closer together than this many bytes are fetched as one: a request costs more than they do."""
_LONGEST = 32 * 2**20
"""Bytes of a request for several ranges at most."""
_TIMEOUT = 120.0
_MISSING = frozenset({404, 410})
_FINAL = frozenset({400, 401, 403, 405, 416})
_FINAL_ATTEMPTS = 3


class RemoteShard:
    """An object behind a URL. Holds no connection, so it may cross into other processes and threads."""

    def __init__(self, url: str, pauses: Sequence[float] = PAUSES) -> None:
        self.url = url
        self._pauses = pauses
        _file_system(url)  # to say at once if such URLs cannot be read

    def stat(self) -> ShardStat:
        """Size, and whatever the server says about the version.

        Raises:
            ShardError: If the object is missing, or the server does not tell its size.
            UnreachableError: If it cannot be had after all attempts.
        """
        info = self._retried("size", self._info)
        stamps = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
        return ShardStat(info["size"], next((str(info[name]) for name in stamps if info.get(name)), ""))

    def read(self, at: ByteRange) -> bytes:
        """Reads exactly this range.

        Raises:
            ShardError: If the object is missing, or the server sends something else.
            UnreachableError: If it cannot be had after all attempts.
        """
        if not at.size:
            return b""
        return self._retried(f"bytes {at.offset} to {at.offset + at.size}", lambda: self._fetch(at))

    def read_all(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads several ranges, neighbours in one request."""
        starts, ends = [at.offset for at in ranges], [at.offset + at.size for at in ranges]
        # Not `cat_ranges`: of file systems that are asynchronous, as HTTP's and S3's, it merges nothing.
        _, starts, ends = merge_offset_ranges(
            [self.url] * len(ranges), starts, ends, max_gap=_NEIGHBOURS, max_block=_LONGEST
        )
        blocks = [self.read(ByteRange(start, end - start)) for start, end in zip(starts, ends, strict=True)]
        content = []
        for at in ranges:
            block = bisect_right(starts, at.offset) - 1
            begin = at.offset - starts[block]
            content.append(blocks[block][begin : begin + at.size])
        return content

    def _info(self) -> dict[str, Any]:
        fs, path = _file_system(self.url)
        info: dict[str, Any] = _run(fs, "info", path)
        if not isinstance(info.get("size"), int):
            raise _UnfitServerError(f"The server of {self.url} does not tell its size; serve it with a Content-Length.")
        return info

    def _fetch(self, at: ByteRange) -> bytes:
        fs, path = _file_system(self.url)
        data: bytes = _run(fs, "cat_file", path, start=at.offset, end=at.offset + at.size)
        if len(data) > at.size:
            raise _UnfitServerError(
                f"The server of {self.url} ignores byte ranges (it sent {len(data)} bytes instead of {at.size}). Use "
                f"one that supports them, copy the shards, or write simplecache::{self.url}, which keeps a "
                "copy of every shard in a temporary folder of each process."
            )
        if len(data) < at.size:
            raise EOFError(f"{len(data)} of {at.size} bytes came")
        return data

    def _retried(self, what: str, attempt: Callable[[], _T]) -> _T:
        return _retried(f"shard {self.url}", what, self._pauses, attempt)


def matching(url: str) -> list[str]:
    """What exists of a pattern, sorted; the URL itself where it has neither ``*`` nor ``?`` nor ``[...]``.

    Over HTTP, folders are listed by the links of their page, and ``?`` begins a query.

    Raises:
        ShardError: If the folder or bucket is missing.
        UnreachableError: If it cannot be listed after all attempts.
    """
    _, _, place = url.partition("://")[2].partition("/")
    magic = r"^[^?]*[*\[]" if url.startswith("http") else r"[*?\[]"
    if not re.search(magic, place):
        return [url]
    fs, path = _file_system(url)

    def listed() -> list[str]:
        names: list[str] = _run(fs, "glob", path)
        fs.invalidate_cache()  # sizes and versions are asked for anew
        return [url[: -len(path)] + name if url.endswith(path) else fs.unstrip_protocol(name) for name in names]

    return sorted(_retried(f"pattern {url}", "list of files", PAUSES, listed))


class _UnfitServerError(ShardError):
    """An answer of a server that shards cannot be read from."""


def _retried(subject: str, what: str, pauses: Sequence[float], attempt: Callable[[], _T]) -> _T:
    for number, pause in enumerate((*pauses, None), start=1):
        try:
            return attempt()
        # Every file system raises errors of its own making for a connection that broke.
        except Exception as error:
            cause = _cause(error)
            reason = f"{type(cause).__name__}: {cause}"
            if isinstance(cause, FileNotFoundError) or _status(cause) in _MISSING:
                raise ShardError(f"The {subject} cannot be read ({reason}).") from error
            if pause is None or (number == _FINAL_ATTEMPTS and _sounds_final(cause)):
                if isinstance(cause, ShardError):
                    raise
                raise UnreachableError(
                    f"The {subject} cannot be read after {number} attempts at its {what} ({reason})."
                ) from error
            _log.warning("%s of the %s: %s. Trying again in %s s.", what, subject, reason, pause)
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _file_system(url: str) -> tuple[Any, str]:
    # Made anew for every read: fsspec keeps one per process and thread, which is what makes forks safe.
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ShardError(f"The shard {url} cannot be read: {error}.") from error
    return fs, path


def _run(fs: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    if fs.async_impl:
        return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=_TIMEOUT, **kwargs)
    return getattr(fs, method)(*args, **kwargs)


def _cause(error: BaseException) -> BaseException:
    # fsspec says "not found" of whatever kept it from asking for a size over HTTP.
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _sounds_final(error: BaseException) -> bool:
    is_refused = isinstance(error, PermissionError | _UnfitServerError) or _status(error) in _FINAL
    return is_refused or "Credentials" in type(error).__name__  # as of every cloud's own library


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of aiohttp, of Google's, Azure's or Amazon's library."""
    response = getattr(error, "response", None)
    of_amazon = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    if isinstance(of_amazon, int):
        return of_amazon
    for name in ("status", "code", "status_code"):
        if isinstance(status := getattr(error, name, None), int):
            return status
    return None
