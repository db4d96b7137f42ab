"""Animated WebP, which FFmpeg reads from version 9 on and PyAV not yet: by Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import BinaryIO

import numpy as np

from lightning_videoscale.data.film import Seek, Shown

_ANIMATION = 0x02


def is_animated_webp(file: BinaryIO) -> bool:
    """Whether the header says so; the file is left at its start."""
    header = file.read(21)
    file.seek(0)
    return header[:4] == b"RIFF" and header[8:16] == b"WEBPVP8X" and bool(header[20] & _ANIMATION)


class WebpAnimation:
    """The frames of an animated WebP, as a `Film`.

    Raises:
        ModuleNotFoundError: If Pillow is not installed.
        ValueError: If it has more pixels than ``max_pixels``.
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
                "Reading animated WebP needs Pillow: pip install 'lightning-videoscale[video]'."
            ) from error
        self._image = Image.open(file, formats=["WEBP"])
        if self._image.width * self._image.height > max_pixels:
            raise ValueError(f"{self._image.width} x {self._image.height} pixels are too many")

    def frames(self, seek: Seek | None = None) -> Iterator[Shown]:
        """Yields all frames; there are no key frames to seek."""
        import av

        begin = 0
        for number in range(getattr(self._image, "n_frames", 1)):
            self._image.seek(number)
            pixels = np.asarray(self._image.convert("RGBA"))
            length = int(self._image.info["duration"])
            yield Shown(begin, length, av.VideoFrame.from_ndarray(pixels, format="rgba"))
            begin += length

    def missing(self) -> tuple[float, float]:
        """Nothing: Pillow finds out itself."""
        return 0.0, 0.0
