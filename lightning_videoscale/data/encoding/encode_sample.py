"""What a sample of videos becomes: latents, embeddings of its caption, and what it has beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.encoding.text import EncodedText
from lightning_videoscale.data.shards.decoding import decode
from lightning_videoscale.data.shards.keys import batch_name
from lightning_videoscale.data.shards.sample_reader import Cut

_PIXEL_FIELDS = ("frames", "height", "width")
_OF_TEXT = ("text_embeds", "text_mask")


class Encoder(Protocol):
    """What makes latents of pixels."""

    name: str
    geometry: ModelGeometry

    def encode(self, video: Tensor) -> Tensor:
        """Encodes pixels (3, F, H, W) uint8 to latents (C, f, h, w)."""
        ...


class TextEncoder(Protocol):
    """What makes embeddings of captions."""

    name: str
    max_length: int

    def encode(self, captions: Sequence[str]) -> EncodedText:
        """Encodes B captions to (B, max_length, D) and their masks."""
        ...


class ReadSample(NamedTuple):
    """A sample that a worker has read, or the reason why not; of latents there is no cut and no video."""

    number: int
    cut: Cut | None
    video: Tensor | None
    members: dict[str, bytes]
    caption: str
    reason: str = ""


class LeftOutError(ValueError):
    """Why a sample is left out."""


class SampleEncoder:
    """What a sample becomes: its members by extension."""

    def __init__(self, pixels: Encoder, text: TextEncoder | None) -> None:
        self._pixels, self._text = pixels, text

    def __call__(self, read: ReadSample) -> dict[str, Any]:
        """Encodes a sample; raises LeftOutError if it cannot be used."""
        if read.video is None or read.cut is None:
            raise LeftOutError(read.reason)
        frames, height, width, _ = read.cut.shape
        pixels = {"frames": frames, "height": height, "width": width, "fps": read.cut.fps, "start": read.cut.start}
        # In a shard of latents these names speak of the latents.
        fields = {
            f"source_{name}" if name in _PIXEL_FIELDS else name: value for name, value in _fields(read.members).items()
        }
        latents = self._pixels.encode(read.video).half().numpy()
        if not np.isfinite(latents).all():
            raise LeftOutError("its latents are not finite in float16")
        return {
            **_with_text(read, self._text),
            "latents.npy": latents,
            "json": fields | {"pixels": pixels},
        }


class TextAdder:
    """What a sample of latents becomes: its members to the byte, and embeddings of its caption in place of others."""

    def __init__(self, text: TextEncoder) -> None:
        self._text = text

    def __call__(self, read: ReadSample) -> dict[str, Any]:
        """Adds embeddings to a sample; raises LeftOutError if it cannot be used."""
        if read.reason:
            raise LeftOutError(read.reason)
        return _with_text(read, self._text)


def _with_text(read: ReadSample, text: TextEncoder | None) -> dict[str, Any]:
    """The members of a sample; with a text encoder, its embeddings in place of others, whatever their format."""
    if text is None:
        return dict(read.members)
    others = {name: content for name, content in read.members.items() if batch_name(name) not in _OF_TEXT}
    return {**others, **embeddings(text, read.caption)}


def embeddings(text: TextEncoder, caption: str) -> dict[str, Any]:
    """Members with the embeddings of a caption's own tokens, and their mask.

    Raises:
        LeftOutError: If they are not finite.
    """
    row = only_row(text.encode([caption]))
    tokens = row["text_mask"].nonzero()
    embeds = row["text_embeds"][: int(tokens.max()) + 1 if len(tokens) else 0]
    if not embeds.isfinite().all():
        raise LeftOutError(f"the embeddings of its caption are not finite in {embeds.dtype}")
    return {
        "text_embeds.safetensors": as_safetensors({"text_embeds": embeds.contiguous()}),
        "text_mask.npy": row["text_mask"].numpy(),
    }


def as_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file."""
    from safetensors.torch import save  # comes with transformers, which made the tensors

    return save(dict(tensors))


def only_row(text: EncodedText) -> dict[str, Tensor]:
    """The only caption's embeddings and mask, by their names in a batch, in host memory."""
    return {"text_embeds": text.embeds[0].cpu().contiguous(), "text_mask": text.mask[0].cpu()}


def _fields(members: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        fields = decode("json", members.get("json", b"{}"))
    except (ValueError, RecursionError) as error:
        raise LeftOutError(f"its .json cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise LeftOutError(f"its .json holds a {type(fields).__name__}; it must hold an object")
    return fields
