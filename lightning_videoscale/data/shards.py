"""Tar shards on this machine: which files a pattern means, and where in a tar each member's bytes lie.

Nothing is ever extracted: a tar is read as a table of names and byte ranges. Names that would point outside the tar
when extracted are refused all the same, since a shard that holds them was made by mistake or by malice.
"""

from __future__ import annotations

import glob
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from webdataset.shardlists import expand_urls
from webdataset.tariterators import base_plus_ext

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
# WebDataset's own bookkeeping (`__meta__/...`), which is no part of any sample.
_BOOKKEEPING = re.compile(r"__[^/]*__($|/)")


class ShardError(ValueError):
    """A shard, or a member of one, that cannot be used. The message names it and the way out."""


class ByteRange(NamedTuple):
    """Where a member's content lies in its tar, in bytes."""

    offset: int
    size: int


Members = dict[str, ByteRange]
"""The members of one sample by extension, such as ``latents.npy`` or ``txt``."""


def expand_shards(shards: str | Sequence[str]) -> list[Path]:
    """Turns the patterns that WebDataset users write into existing files, in the order written.

    Args:
        shards: One pattern or several. Braces (``{000..099}``, ``{train,extra}``) and ``::`` mean what they mean in
            WebDataset; ``*``, ``?`` and ``[...]`` match existing files, sorted by name.

    Raises:
        ShardError: If a pattern is a URL or a command (``pipe:``), names a file that does not exist, or matches none;
            or if one file is named twice.
    """
    patterns = [shards] if isinstance(shards, str) else list(shards)
    paths = [path for pattern in patterns for url in expand_urls(pattern) for path in _local_files(url)]
    if not paths:
        raise ShardError(f"No shards found: the patterns {patterns} match no file.")
    if missing := [str(path) for path in paths if not path.is_file()]:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ShardError(
            f"No shards found at {len(missing)} of the {len(paths)} places that {patterns} names: {shown}. "
            f"The current folder is {Path.cwd()}; check the path and the range in braces, and write a folder as "
            "'folder/*.tar'."
        )
    if len({path.resolve() for path in paths}) < len(paths):
        twice = next(path for i, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:i]})
        raise ShardError(f"The shard {twice} is named twice by {patterns}; name every shard once.")
    return paths


def _local_files(url: str) -> list[Path]:
    if scheme := _SCHEME.match(url):
        why = "would run a command" if scheme[0] == "pipe:" else "is not a file on this machine"
        raise ShardError(
            f"The shard {url!r} {why}; only local paths are read. Copy or mount the shards and give their paths "
            f"(a local name that holds a colon is written './{url}')."
        )
    if any(c in url for c in "*?[") and not Path(url).exists():
        return [Path(match) for match in sorted(glob.glob(url))]
    return [Path(url)]


def scan_members(path: Path) -> dict[str, Members]:
    """Lists the samples of a tar: per key, the byte range of each member.

    A member ``a/b.latents.npy`` belongs to the sample ``a/b`` under the extension ``latents.npy``, as in WebDataset.
    Folders, WebDataset's bookkeeping and names without an extension belong to no sample.

    Raises:
        ShardError: If the file is no uncompressed tar, ends early, or holds a link, a device, a name that leaves the
            tar, or one name twice.
    """
    samples: dict[str, Members] = {}
    for member in _read_headers(path):
        _check_member(path, member)
        key, extension = base_plus_ext(member.name)
        if not member.isreg() or key is None or _BOOKKEEPING.match(member.name):
            continue
        members = samples.setdefault(key, {})
        if extension in members:
            raise ShardError(f"{path}: the member {member.name!r} appears twice; its sample is ambiguous.")
        members[extension] = ByteRange(member.offset_data, member.size)
    return samples


def _read_headers(path: Path) -> list[tarfile.TarInfo]:
    headers = []
    try:
        with tarfile.open(path, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0:
                    raise tarfile.ReadError(f"the member {member.name!r} has the size {member.size}")
                headers.append(member)
            end = tar.offset
    # ValueError and OverflowError: numbers in damaged headers that tarfile does not check.
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise ShardError(
            f"{path} is not an uncompressed tar file, or is damaged ({error}). Shards are written by "
            "webdataset.TarWriter or `tar cf`; decompress a .tar.gz first, since members are read by byte range."
        ) from error
    _check_end(path, end)
    return headers


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise ShardError(f"{path}: the member {member.name!r} points outside the shard; write it under a plain name.")
    if not (member.isreg() or member.isdir()) or member.issparse():
        kind = "a link" if member.islnk() or member.issym() else "not a plain file"
        raise ShardError(
            f"{path}: the member {member.name!r} is {kind}; write the content itself (`tar --dereference`)."
        )


def _check_end(path: Path, end: int) -> None:
    # tarfile takes garbage after the first member for the end of the archive, which would lose samples in silence.
    with path.open("rb") as file:
        file.seek(end)
        marker = file.read(tarfile.BLOCKSIZE)
    if marker != bytes(tarfile.BLOCKSIZE):
        raise ShardError(f"{path} ends early or is damaged at byte {end}: no end-of-archive mark. Write it again.")
