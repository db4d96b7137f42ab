"""Which members of a tar make one sample, what the dots in their names mean, and how a batch names them.

WebDataset ends a key at the first dot of the file's name: `clip7.latents.npy` is the member `latents.npy` of `clip7`.
Read so, `movie.v1.0.mp4` and `movie.v1.0.txt` are members `v1.0.mp4` and `v1.0.txt` of `movie`: no caption, and one
sample with `movie.v2.0.mp4`. Where all members that share such a key carry the full name of a main member, that name is
the key.
"""

from __future__ import annotations

from lightning_videoscale.data.shards.decoding import is_decodable, suffix
from lightning_videoscale.data.shards.location import Members
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES

RESERVED = frozenset({"sample_ids", "meta", "caption", "latents", "video"})
"""Names in a batch that no member may take beside the main one; by the last two a batch tells what it is of."""

_LATENTS = ("latents.npy", "latents.safetensors")
_BESIDE = ("txt", "json")


def batch_name(extension: str) -> str:
    """Name of a member in the batch: ``txt`` is ``caption``, ``latents.npy`` is ``latents``, ``json`` is ``json``."""
    return "caption" if extension == "txt" else extension.rpartition(".")[0] or extension


def plain_extension(extension: str) -> str:
    """The extension of a member with its format in small letters, where it is read: ``txt`` of ``TXT``.

    Names before it stay as they are (``Mask.npy`` of ``Mask.NPY``), but for that of latents.
    """
    *names, kind = extension.split(".")
    if not is_decodable(kind) and kind.lower() not in VIDEO_SUFFIXES:
        return extension
    if names and names[-1].lower() == "latents":
        names[-1] = "latents"
    return ".".join([*names, kind.lower()])


def split_dotted(key: str, members: Members) -> dict[str, Members]:
    """Parts members of one key, as WebDataset reads it, into samples.

    A dotted name counts where it has latents or a video, or a picture with a text or fields: ``first.png`` alone is a
    picture that has a name.

    Args:
        key: All up to the first dot.
        members: By all that follows it.

    Returns:
        Samples by key. Where a member belongs to none of the dotted names, they are one sample, unless there are
        several names and that member has one too: then it has only lost its main member.
    """
    names = {name for extension in members if (name := _dotted_name(extension, members))}
    parts: dict[str, Members] = {}
    for extension, at in members.items():
        name = _longest_of(names, extension)
        if name is None and len(names) > 1:
            name = extension.rpartition(".")[0]
        if not name:
            return {key: members}
        parts.setdefault(f"{key}.{name}", {})[extension.removeprefix(f"{name}.")] = at
    return parts


def _longest_of(names: set[str], extension: str) -> str | None:
    """The longest of some names that an extension begins with, up to a dot."""
    name = extension.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


def _dotted_name(extension: str, members: Members) -> str | None:
    """What precedes the format of a main member; None where it is no main member or nothing does."""
    lowered = extension.lower()
    for latents in _LATENTS:
        if lowered.endswith(f".{latents}"):
            return extension[: -len(latents) - 1]
    name = extension.rpartition(".")[0]
    if suffix(extension) in VIDEO_SUFFIXES:
        return name or None
    is_named = suffix(extension) in IMAGE_SUFFIXES and any(f"{name}.{beside}" in members for beside in _BESIDE)
    return name if name and is_named else None
