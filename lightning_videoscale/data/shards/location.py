"""Where things lie: shards by path or URL, members of a shard by byte range."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SCHEME = re.compile(r"^\s*([A-Za-z][A-Za-z0-9+.-]*):")


class ByteRange(NamedTuple):
    """Where a member's content lies in its tar, in bytes."""

    offset: int
    size: int


class ShardStat(NamedTuple):
    """Bytes of a shard, and a mark that changes when it is written again (modification time, ETag)."""

    size: int
    stamp: str


Members = dict[str, ByteRange]
"""The members of one sample by extension, such as ``latents.npy`` or ``txt``."""


def is_remote(url: str) -> bool:
    """Whether a shard is read through fsspec: ``https://…``, ``s3://…``, ``memory://…``."""
    return "://" in url and SCHEME.match(url) is not None


def identity(url: str) -> str:
    """What two names of one shard have in common: the URL, or the file that a path leads to."""
    return url if is_remote(url) else str(Path(url).resolve())


def file_name(url: str) -> str:
    """`identity` without folders."""
    return (identity(url) if os.path.islink(url) else url).rpartition("/")[2]


def identities(urls: Iterable[str]) -> list[str]:
    """`identity` of many, for which each folder is looked at once."""
    folders: dict[str, str] = {}
    found = []
    for url in urls:
        folder, name = os.path.split(url)
        if is_remote(url) or name in ("", ".", "..") or os.path.islink(url):
            found.append(identity(url))
            continue
        if folder not in folders:
            folders[folder] = identity(folder)
        found.append(os.path.join(folders[folder], name))
    return found


def short_names(urls: Sequence[str]) -> tuple[str, ...]:
    """The shards' names below the folder that all share, the same wherever that folder lies."""
    parts = [url.split("/") for url in identities(urls)]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return tuple("/".join(p[shared:]) for p in parts)
