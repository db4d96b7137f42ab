"""Pictures that FFmpeg alone would read wrong: animated WebP and TIFF, by Pillow, and GIF that was cut.

FFmpeg reads the first from version 9 on, leaves black what it cannot read of the second, and fills up the third.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from lightning_videoscale.data.shards.film import MediaError, Seek, Shown

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from PIL.Image import Image

_TIFF = (b"II*\0", b"MM\0*")
_ANIMATION = 0x02
_GIF_EXTENSION, _GIF_PICTURE, _GIF_HAS_COLORS = 0x21, 0x2C, 0x80
_SHOWN_AS_THEY_ARE = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}


def is_for_pillow(file: BinaryIO) -> bool:
    """Whether a file's first bytes are those of an animated WebP or a TIFF; it is left at its start."""
    file.seek(0)
    header = file.read(21)
    file.seek(0)
    is_webp = header[:4] == b"RIFF" and header[8:16] == b"WEBPVP8X"
    return header[:4] in _TIFF or (is_webp and bool(header[20] & _ANIMATION))


def check_gif(file: BinaryIO) -> None:
    """Raises MediaError if a file is a GIF that ends within one of its blocks; the file is left at its start."""
    file.seek(0)
    data = file.read() if file.read(4) == b"GIF8" else b""
    file.seek(0)
    try:
        # Behind the signature, of which 4 bytes are read: version, size, flags, and a table of colours.
        at = 9 + _gif_colors(data[6]) if data else 0
        while at < len(data) and data[at] in (_GIF_EXTENSION, _GIF_PICTURE):
            at += 2 if data[at] == _GIF_EXTENSION else 11 + _gif_colors(data[at + 9])
            while length := data[at]:
                at += 1 + length
            at += 1
    except IndexError:
        raise MediaError(f"it ends early, at byte {4 + len(data)} in the middle of a picture") from None


class PillowFilm:
    """The frames of an animated WebP, or the first picture of a TIFF, as a `Film`.

    Raises:
        ModuleNotFoundError: If Pillow is not installed.
        OSError, ValueError: If it does not decode, or has more than ``max_pixels``.
    """

    tick = 0.001
    interval = 0.01  # no browser shows a frame for less
    aspect = Fraction(1)
    may_be_still = True

    def __init__(self, file: BinaryIO, max_pixels: int) -> None:
        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Reading animated WebP and TIFF needs Pillow: pip install 'lightning-videoscale[video]'."
            ) from error
        try:
            self._image = Image.open(file, formats=["WEBP", "TIFF"])
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from error
        if self._image.width * self._image.height > max_pixels:
            raise ValueError(f"{self._image.width} x {self._image.height} pixels are too many")

    def frames(self, seek: Seek | None = None) -> Iterator[Shown]:
        """Yields all frames; there are no key frames to seek."""
        from PIL import ImageOps

        begin = 0
        for number in range(1 if self._image.format == "TIFF" else getattr(self._image, "n_frames", 1)):
            self._image.seek(number)
            frame = _frame(ImageOps.exif_transpose(self._image))
            length = int(self._image.info.get("duration", 0))
            yield Shown(begin, length, frame)
            begin += length

    def missing(self) -> tuple[float, float]:
        """Nothing: Pillow finds out itself."""
        return 0.0, 0.0


def _frame(image: Image) -> VideoFrame:
    from av import VideoFrame

    if image.mode.startswith("I;16"):
        return VideoFrame.from_ndarray(np.asarray(image).astype("<u2"), format="gray16le")
    if image.mode not in _SHOWN_AS_THEY_ARE:
        raise ValueError(f"pixels of the kind {image.mode!r} have no colours of their own")
    return VideoFrame.from_ndarray(np.asarray(image.convert("RGBA")), format="rgba")


def _gif_colors(flags: int) -> int:
    """Bytes of a table of colours that follows these flags."""
    return 3 * 2 ** (1 + flags % 8) if flags & _GIF_HAS_COLORS else 0
