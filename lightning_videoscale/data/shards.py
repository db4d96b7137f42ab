"""Which shards a pattern means: local paths and URLs, as WebDataset users write them."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from webdataset.shardlists import expand_urls

_SCHEME = re.compile(r"^\s*([A-Za-z][A-Za-z0-9+.-]*):")


class ShardError(ValueError):
    """A shard, or a member of one, that cannot be used. The message names it and the way out."""


class MemberError(ShardError):
    """A member that cannot be used, in a shard that can."""


class ByteRange(NamedTuple):
    """Where a member's content lies in its tar, in bytes."""

    offset: int
    size: int


Members = dict[str, ByteRange]
"""The members of one sample by extension, such as ``latents.npy`` or ``txt``."""


def is_remote(url: str) -> bool:
    """Whether a shard is read through fsspec: ``https://…``, ``s3://…``, ``memory://…``."""
    return "://" in url and _SCHEME.match(url) is not None


def expand_shards(shards: str | Path | Sequence[str | Path]) -> list[str]:
    """Turns the patterns that WebDataset users write into shards, in the order written.

    Args:
        shards: One pattern or several. Braces (``{000..099}``, ``{train,extra}``) and ``::`` mean what they mean in
            WebDataset; ``*``, ``?`` and ``[...]`` match existing local files, sorted by name. URLs are those of fsspec.

    Returns:
        Local paths and URLs. That a URL exists is found out when it is read.

    Raises:
        ShardError: If a pattern is a command (``pipe:``), names a local file that does not exist, or matches none; or
            if one shard is named twice.
    """
    patterns = [str(pattern) for pattern in ([shards] if isinstance(shards, (str, Path)) else shards)]
    urls = [url for pattern in patterns for part in expand_urls(pattern) for url in _shards_of(part)]
    if not urls:
        raise ShardError(f"No shards found: the patterns {patterns} match no file.")
    local = [url for url in urls if not is_remote(url)]
    if missing := [url for url in local if not Path(url).is_file()]:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ShardError(
            f"No shards found at {len(missing)} of the {len(urls)} places that {patterns} names: {shown}. "
            f"The current folder is {Path.cwd()}; check the path and the range in braces, and write a folder as "
            "'folder/*.tar'."
        )
    shard, times = Counter(map(identity, urls)).most_common(1)[0]
    if times > 1:
        raise ShardError(f"The shard {shard} is named twice by {patterns}; name every shard once.")
    return urls


def identity(url: str) -> str:
    """What two names of one shard have in common: the URL, or the file that a path leads to."""
    return url if is_remote(url) else str(Path(url).resolve())


def short_names(urls: Sequence[str]) -> tuple[str, ...]:
    """The shards' names below the folder that all share, the same wherever that folder lies."""
    parts = [identity(url).split("/") for url in urls]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return tuple("/".join(p[shared:]) for p in parts)


def _shards_of(url: str) -> list[str]:
    if is_remote(url):
        return [url.strip()]
    if scheme := _SCHEME.match(url):
        why = "would run a command" if scheme[1] == "pipe" else "is no URL of fsspec, which has '://'"
        raise ShardError(
            f"The shard {url!r} {why}; only files are read. Give a path, or a URL such as 's3://bucket/000.tar' "
            f"(a local name that holds a colon is written './{url}')."
        )
    if any(c in url for c in "*?[") and not Path(url).exists():
        return sorted(glob.glob(url))
    return [url]
