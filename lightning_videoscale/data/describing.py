"""What a sample is: its media kind and its true shape, found by looking at its members' content."""

from __future__ import annotations

from typing import Any

from lightning_videoscale.data.batch import RESERVED, batch_name
from lightning_videoscale.data.decoding import NPY_HEADER_LIMIT, PICKLED, decode, is_decodable, npy_header, suffix
from lightning_videoscale.data.film import MediaError
from lightning_videoscale.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from lightning_videoscale.data.probing import Footage, probe
from lightning_videoscale.data.safetensors import HEADER_LIMIT, main_tensor, read_header
from lightning_videoscale.data.samples import LatentShape, Sample
from lightning_videoscale.data.shapes import Media
from lightning_videoscale.data.shards import ByteRange, Members
from lightning_videoscale.data.storage import Shard, open_member
from lightning_videoscale.data.tars import Refusal

_LATENTS = ("latents.npy", "latents.safetensors", "safetensors")


class RefusedError(ValueError):
    """A sample that is left out, with the member to blame."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(member, reason)
        self.refusal = Refusal(member, reason)


def describe(shard: Shard, key: str, members: Members) -> Sample:
    """Looks at one sample.

    A sample has one main member: latents (``latents.npy``, ``latents.safetensors`` or ``safetensors``), a video, or an
    image, looked for in this order. Videos and images are decoded from end to end; of latents the header is read.

    Args:
        shard: Where it lies.
        key: Its name.
        members: Its members.

    Raises:
        RefusedError: If it cannot be used.
        ShardError: If the shard cannot be read.
    """
    for extension in members:
        if suffix(extension) in PICKLED:
            raise RefusedError(
                f"{key}.{extension}",
                "it is a pickle, which runs code when it is loaded; write tensors as .npy and fields as .json",
            )
    main = _main_member(key, members)
    read = {extension: at for extension, at in members.items() if extension == main or _passes_through(extension)}
    for extension in read:
        if extension != "txt" and batch_name(extension) in RESERVED:
            raise RefusedError(
                f"{key}.{extension}", f"a batch uses the name {batch_name(extension)!r} itself; rename it"
            )
    caption_length = _caption_length(shard, key, read)
    members = {main: read.pop(main), **read}
    if main in _LATENTS:
        shape = _latent_shape(shard, f"{key}.{main}", members[main])
        _check_shape_fields(shard, key, members, shape)
        return Sample(key, Media.LATENTS, *shape, 0.0, 0.0, caption_length, members)
    footage = _footage(shard, f"{key}.{main}", members[main])
    media = Media.IMAGE if footage.is_image else Media.VIDEO
    return Sample(
        key, media, 3, footage.num_frames, footage.height, footage.width, footage.fps, footage.duration,
        caption_length, members, footage.seeks,
    )  # fmt: skip


def _main_member(key: str, members: Members) -> str:
    for latents in _LATENTS:
        if latents in members:
            return latents
    for suffixes in (VIDEO_SUFFIXES, IMAGE_SUFFIXES):
        found = [extension for extension in members if suffix(extension) in suffixes]
        bare = [extension for extension in found if extension.lower() in suffixes] or found
        if len(bare) > 1:
            raise RefusedError(f"{key}.{bare[1]}", f"the sample holds {bare}; it may hold one of them")
        if bare:
            return bare[0]
    raise RefusedError(
        key,
        f"it has neither latents nor a video nor an image; found {sorted(members)}. Known are {', '.join(_LATENTS)}, "
        f"{', '.join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))}",
    )


def _passes_through(extension: str) -> bool:
    """Whether a member beside the main one is read: numbers, fields, text, and pictures that have a name."""
    return is_decodable(extension) and extension.lower() not in IMAGE_SUFFIXES


def _caption_length(shard: Shard, key: str, members: Members) -> int:
    if "txt" not in members:
        return 0
    try:
        return len(decode("txt", shard.read(members["txt"])))
    except ValueError as error:
        raise RefusedError(f"{key}.txt", f"it is not UTF-8 text: {error}") from error


def _footage(shard: Shard, member: str, at: ByteRange) -> Footage:
    if not at.size:
        raise RefusedError(member, "it is empty")
    try:
        with open_member(shard, at) as file:
            return probe(file)
    except MediaError as error:
        raise RefusedError(member, str(error)) from error


def _latent_shape(shard: Shard, member: str, at: ByteRange) -> LatentShape:
    try:
        if suffix(member) == "npy":
            found, numbers, size = npy_header(shard.read(ByteRange(at.offset, min(at.size, NPY_HEADER_LIMIT))))
            is_whole_float = numbers.kind == "f" and size == at.size
            what = f"{numbers}, {at.size} of {size} bytes"
        else:
            tensors = read_header(shard.read(ByteRange(at.offset, min(at.size, HEADER_LIMIT))), at.size)
            _, found, begin, end = tensor = tensors[main_tensor(tensors)]
            is_whole_float, what = tensor.dtype.is_floating_point, f"{tensor.dtype}, {end - begin} bytes"
    except ValueError as error:
        raise RefusedError(member, f"the latents cannot be read: {error}") from error
    if len(found) != 4 or min(found) < 1 or not is_whole_float:
        raise RefusedError(
            member,
            f"the latents are of shape {found}, {what}; they must be a whole (C, F, H, W) array of floating-point "
            "numbers",
        )
    channels, frames, height, width = found
    return channels, frames, height, width


def _check_shape_fields(shard: Shard, key: str, members: Members, shape: LatentShape) -> None:
    if "json" not in members:
        return
    try:
        fields: Any = decode("json", shard.read(members["json"]))
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{key}.json", f"it cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError(f"{key}.json", f"it holds a {type(fields).__name__}; it must hold an object")
    actual = dict(zip(("frames", "height", "width"), shape[1:], strict=True))
    if wrong := {name: fields[name] for name in actual if name in fields and fields[name] != actual[name]}:
        raise RefusedError(
            f"{key}.json",
            f"it says {wrong} and the latents are {actual}; it describes the latents, keep the pixels' shape under "
            "other names",
        )
