"""What is in a tar: where each member's bytes lie, and which members are refused.

Nothing is ever extracted: a tar is read as a table of names and byte ranges. Names that would point outside the tar
when extracted are refused all the same, since a shard that holds them was made by mistake or by malice.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

from webdataset.tariterators import base_plus_ext

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.keys import plain_extension, split_dotted
from lightning_videoscale.data.shards.location import ByteRange, Members

_BOOKKEEPING = re.compile(r"__[^/]*__($|/)")
"""Begins names of WebDataset's own bookkeeping (``__meta__/...``), which is no part of any sample."""


def own_key(key: str) -> str:
    """A key for a sample that is to be written: another one, where WebDataset takes this for its bookkeeping."""
    return f"_{key.lstrip('_')}" if _BOOKKEEPING.match(key) else key


class Refusal(NamedTuple):
    """A member that is left out, and why. An empty name stands for the shard as a whole."""

    member: str
    reason: str


class TarListing(NamedTuple):
    """The samples of a tar by key, each with the byte ranges of its members, and what was refused."""

    samples: dict[str, Members]
    refused: tuple[Refusal, ...]


def list_members(file: BinaryIO, size: int) -> TarListing:
    """Lists the samples of a tar.

    A member ``a/b.latents.npy`` belongs to the sample ``a/b`` under the extension ``latents.npy``, as in WebDataset;
    of names with more dots, see `split_dotted`, and of capital letters `plain_extension`. Folders, WebDataset's
    bookkeeping and names without an extension belong to no sample.

    Refused are: links, devices and names that leave the tar, with the rest of their sample; samples that hold one name
    twice; everything from the first damaged header on; what follows the mark of the archive's end; and a file that is
    no uncompressed tar, as a whole.

    Args:
        file: The tar, seekable.
        size: Its length in bytes.

    Raises:
        ShardError: If the tar cannot be read; of that nothing follows for what it is.
    """
    groups: dict[str, Members] = {}
    refused: dict[str, Refusal] = {}
    damage = None
    try:
        for member in _headers(file, size):
            key, written = base_plus_ext(member.name)
            extension = "" if key is None else plain_extension(written)
            name = member.name if key is None else f"{key}.{extension}"
            members = {} if key is None else groups.setdefault(key, {})
            if reason := _why_hostile(member):
                refused[name] = Refusal(member.name, reason)
            elif not member.isreg() or key is None or _BOOKKEEPING.match(member.name):
                continue
            elif extension in members:
                refused[name] = Refusal(member.name, f"the name {name!r} appears twice; its sample is ambiguous")
            members[extension] = ByteRange(member.offset_data, member.size)
    except _DamagedTarError as error:
        damage = str(error)
    usable: dict[str, Members] = {}
    for key, members in groups.items():
        if damage is not None:  # the last member listed may itself be cut off
            cut = [f"{key}.{extension}" for extension, at in members.items() if at.offset + at.size > size]
            refused |= {name: Refusal(name, f"the shard ends within it, at byte {size}") for name in cut}
        for sample, own in split_dotted(key, members).items():
            if refused.keys().isdisjoint(f"{sample}.{extension}" for extension in own):
                usable[sample] = own
    refused |= {"": Refusal("", damage)} if damage is not None else {}
    return TarListing(usable, tuple(refused.values()))


class _DamagedTarError(ValueError):
    pass


def _headers(file: BinaryIO, size: int) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0:
                    raise tarfile.ReadError(f"the member {member.name!r} has the size {member.size}")
                yield member
            end = tar.offset
    except ShardError:
        raise
    # ValueError and OverflowError: numbers in damaged headers that tarfile does not check.
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise _DamagedTarError(
            f"it is not an uncompressed tar file, or is damaged ({error}). Shards are written by webdataset.TarWriter "
            "or `tar cf`; decompress a .tar.gz first, since members are read by byte range"
        ) from error
    # tarfile takes garbage after the first member for the end of the archive, which would lose samples in silence.
    file.seek(min(end, size))
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _DamagedTarError(
            f"it ends early or is damaged at byte {end} of {size}: no end-of-archive mark. What lies before is used; "
            "write the shard again for the rest"
        )
    if (rest := _first_after_zeros(file, size)) is not None:
        raise _DamagedTarError(
            f"its end-of-archive mark is at byte {end}, and bytes {rest} to {size} behind it are not zero, as where "
            "`cat` has joined two tars. What lies before is used; join tars with `tar --concatenate` for the rest"
        )


def _first_after_zeros(file: BinaryIO, size: int) -> int | None:
    """Where a file goes on with something else than zeros; None: it does not. Mostly zeros fill a record of 10 KiB."""
    while left := size - file.tell():
        begin, content = file.tell(), file.read(min(left, tarfile.RECORDSIZE))
        if others := content.lstrip(b"\0"):
            return begin + len(content) - len(others)
    return None


def _why_hostile(member: tarfile.TarInfo) -> str | None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        return "it points outside the shard; write it under a plain name"
    if not (member.isreg() or member.isdir()) or member.issparse():
        kind = "a link" if member.islnk() or member.issym() else "not a plain file"
        return f"it is {kind}; write the content itself (`tar --dereference`)"
    return None if _is_text(member.name) else "its name is not UTF-8; rename it"


def _is_text(name: str) -> bool:
    # tarfile keeps bytes that are not UTF-8 as lone surrogates, which can be neither printed nor sent.
    return not any("\ud800" <= character <= "\udfff" for character in name)
