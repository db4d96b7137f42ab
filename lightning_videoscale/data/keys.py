"""Which members of a tar make one sample, and what the dots in their names mean.

WebDataset ends a key at the first dot of the file's name: `clip7.latents.npy` is the member `latents.npy` of `clip7`.
Read so, `movie.v1.0.mp4` and `movie.v1.0.txt` are members `v1.0.mp4` and `v1.0.txt` of `movie`: no caption, and one
sample with `movie.v2.0.mp4`. Where all members that share such a key carry the full name of a main member, that name is
the key.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_videoscale.data.decoding import suffix
from lightning_videoscale.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from lightning_videoscale.data.shards import Members

_LATENTS = ("latents.npy", "latents.safetensors")
_BESIDE = ("txt", "json")


def split_dotted(key: str, members: Members) -> Iterator[tuple[str, Members]]:
    """Parts members of one key, as WebDataset reads it, into samples.

    A dotted name counts where it has latents or a video, or a picture with a text or fields: ``first.png`` alone is a
    picture that has a name.

    Args:
        key: All up to the first dot.
        members: By all that follows it.

    Yields:
        Samples by key: several, or one with a dotted key, if each member belongs to one of them; else what was given.
    """
    names = sorted(filter(None, (_dotted_name(extension, members) for extension in members)), key=len, reverse=True)
    parts: dict[str, Members] = {}
    for extension, at in members.items():
        name = next((name for name in names if extension.startswith(f"{name}.")), None)
        if name is None:
            yield key, members
            return
        parts.setdefault(f"{key}.{name}", {})[extension.removeprefix(f"{name}.")] = at
    yield from parts.items()


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
