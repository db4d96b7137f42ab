"""What a sample is: its media kind and its true shape, found by looking at its members' content."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_videoscale.data.planning.shapes import Media
from lightning_videoscale.data.shards.captions import Caption, find_caption
from lightning_videoscale.data.shards.decoding import (
    NPY_HEADER_LIMIT,
    PICKLED,
    decode,
    is_decodable,
    npy_header,
    suffix,
)
from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.keys import RESERVED, batch_name
from lightning_videoscale.data.shards.location import ByteRange, Members
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from lightning_videoscale.data.shards.probing import Footage, probe
from lightning_videoscale.data.shards.safetensors import HEADER_LIMIT, main_tensor, read_header
from lightning_videoscale.data.shards.samples import LatentShape, Sample
from lightning_videoscale.data.shards.storage import Shard, open_member
from lightning_videoscale.data.shards.tars import Refusal

_LATENTS = ("latents.npy", "latents.safetensors", "safetensors")
_PICKLE = "it is a pickle, which runs code when it is loaded"
_CONVERT = (
    f"{_PICKLE}. This converts it safely, FILE being this member and KEY its sample:\n"
    "    import numpy, torch\n"
    "    latents = torch.load('FILE', map_location='cpu', weights_only=True)\n"
    "    numpy.save('KEY.latents.npy', latents.half().numpy())"
)


class RefusedError(ValueError):
    """A sample that is left out, with the member to blame."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(member, reason)
        self.refusal = Refusal(member, reason)


class Described(NamedTuple):
    """What was found of a sample.

    Attributes:
        sample: The sample.
        caption: Its caption.
        ignored: Tensors beside its latents in the same member, as ``safetensors:text_embeds``, which are not read.
    """

    sample: Sample
    caption: Caption
    ignored: tuple[str, ...] = ()


def describe(
    shard: Shard, key: str, members: Members, caption_key: str | None = None, known: Sample | None = None
) -> Described:
    """Looks at one sample.

    A sample has one main member: latents (``latents.npy``, ``latents.safetensors`` or ``safetensors``), a video, or an
    image, looked for in this order. Videos and images are decoded from end to end; of latents the header is read.

    Args:
        shard: Where it lies.
        key: Its name.
        members: Its members.
        caption_key: Field of ``.json`` that holds the caption; see `find_caption`.
        known: What it was when it was looked at before; then only its caption is read.

    Raises:
        RefusedError: If it cannot be used.
        ShardError: If the shard cannot be read.
    """
    if known is not None:
        caption = _caption(shard, key, known.members, caption_key)
        return Described(known._replace(caption_length=len(caption.text)), caption)
    main = _main_member(key, members)
    read = {extension: at for extension, at in members.items() if extension == main or _passes_through(extension)}
    taken = {"latents" if main in _LATENTS else "video": main}
    for extension in (each for each in read if each not in ("txt", main)):
        name = batch_name(extension)
        if (other := taken.setdefault(name, extension)) != extension:
            raise RefusedError(
                f"{key}.{extension}", f"a batch would name it {name!r}, as it does '{key}.{other}'; rename one"
            )
        if name in RESERVED:
            raise RefusedError(f"{key}.{extension}", f"a batch uses the name {name!r} itself; rename it")
    caption = _caption(shard, key, read, caption_key)
    members = {main: read.pop(main), **read}
    if main in _LATENTS:
        shape, others = _latents(shard, f"{key}.{main}", members[main])
        _check_shape_fields(shard, key, members, shape)
        sample = Sample(key, Media.LATENTS, *shape, 0.0, 0.0, len(caption.text), members)
        return Described(sample, caption, tuple(f"{main}:{other}" for other in others))
    footage = _footage(shard, f"{key}.{main}", members[main])
    media = Media.IMAGE if footage.is_image else Media.VIDEO
    sample = Sample(
        key, media, 3, footage.num_frames, footage.height, footage.width, footage.fps, footage.duration,
        len(caption.text), members, footage.seeks,
    )  # fmt: skip
    return Described(sample, caption)


def _main_member(key: str, members: Members) -> str:
    for latents in _LATENTS:
        if latents in members:
            return latents
    pickled = [extension for extension in members if suffix(extension) in PICKLED]
    for extension in pickled:
        if "latents" in extension.lower().split("."):
            raise RefusedError(f"{key}.{extension}", _why_pickled(extension))
    for suffixes in (VIDEO_SUFFIXES, IMAGE_SUFFIXES):
        found = [extension for extension in members if suffix(extension) in suffixes]
        bare = [extension for extension in found if extension.lower() in suffixes] or found
        if len(bare) > 1:
            raise RefusedError(
                f"{key}.{bare[1]}",
                f"the sample holds {bare}; it may hold one of them. A sample's name ends at the first dot, so files "
                "of several samples must differ before it",
            )
        if bare:
            return bare[0]
    if "npy" in members:
        raise RefusedError(f"{key}.npy", f"latents have a name: write this member as '{key}.latents.npy'")
    if pickled:
        raise RefusedError(f"{key}.{pickled[0]}", _why_pickled(pickled[0]))
    raise RefusedError(
        key,
        f"it has neither latents nor a video nor an image; found {sorted(members)}. Known are {', '.join(_LATENTS)}, "
        f"{', '.join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))}",
    )


def _why_pickled(extension: str) -> str:
    is_of_torch = suffix(extension) in ("pth", "pt")
    return _CONVERT if is_of_torch else f"{_PICKLE}; write tensors as .npy and fields as .json"


def _passes_through(extension: str) -> bool:
    """Whether a member beside the main one is read: numbers, fields, text, and pictures that have a name."""
    return is_decodable(extension) and extension.lower() not in IMAGE_SUFFIXES


def _caption(shard: Shard, key: str, members: Members, caption_key: str | None) -> Caption:
    text = _decoded(shard, key, "txt", members) if "txt" in members else ""
    is_needed = "json" in members and (caption_key is not None or not text.strip())
    return find_caption(text, _decoded(shard, key, "json", members) if is_needed else None, caption_key)


def _decoded(shard: Shard, key: str, extension: str, members: Members) -> Any:
    data = shard.read(members[extension])
    try:
        return decode(extension, data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{key}.{extension}", f"it cannot be read: {error}") from error


def _footage(shard: Shard, member: str, at: ByteRange) -> Footage:
    if not at.size:
        raise RefusedError(member, "it is empty")
    try:
        with open_member(shard, at) as file:
            return probe(file)
    except MediaError as error:
        raise RefusedError(member, str(error)) from error


def _latents(shard: Shard, member: str, at: ByteRange) -> tuple[LatentShape, list[str]]:
    """The shape of latents, and the other tensors of the same member."""
    others: list[str] = []
    is_npy = suffix(member) == "npy"
    header = shard.read(ByteRange(at.offset, min(at.size, NPY_HEADER_LIMIT if is_npy else HEADER_LIMIT)))
    try:
        if is_npy:
            found, numbers, size = npy_header(header)
            is_whole_float = numbers.kind == "f" and size == at.size
            what = f"{numbers}, {at.size} of {size} bytes"
        else:
            tensors = read_header(header, at.size)
            _, found, begin, end = tensor = tensors.pop(main_tensor(tensors))
            others = list(tensors)
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
    return (channels, frames, height, width), others


def _check_shape_fields(shard: Shard, key: str, members: Members, shape: LatentShape) -> None:
    if "json" not in members:
        return
    fields = _decoded(shard, key, "json", members)
    if not isinstance(fields, dict):
        raise RefusedError(f"{key}.json", f"it holds a {type(fields).__name__}; it must hold an object")
    actual = dict(zip(("frames", "height", "width"), shape[1:], strict=True))
    if wrong := {name: fields[name] for name in actual if name in fields and fields[name] != actual[name]}:
        raise RefusedError(
            f"{key}.json",
            f"it says {wrong} and the latents are {actual}; it describes the latents, keep the pixels' shape under "
            "other names",
        )
