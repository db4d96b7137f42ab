"""Films made on the spot whose frames say their own number, by their brightness."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

_STEP = 5
_DARKEST = 6


def numbered(number: int, height: int = 48, width: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A grey frame that says ``number``, up to 49."""
    return np.full((height, width, 3), _DARKEST + _STEP * number, np.uint8)


def numbers(video: torch.Tensor) -> list[int]:
    """The numbers of the frames of a decoded video (3, F, H, W)."""
    means: list[float] = video.float().mean(dim=(0, 2, 3)).tolist()
    return [round((mean - _DARKEST) / _STEP) for mean in means]


def picture(number: int = 3, kind: str = "JPEG") -> bytes:
    """A photograph that says ``number``."""
    file = io.BytesIO()
    Image.fromarray(numbered(number)).save(file, kind)
    return file.getvalue()


def film(
    frames: Sequence[np.ndarray[Any, Any]],
    container: str = "mp4",
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    times: Sequence[float] | None = None,
    rate: int | Fraction = 25,
    rotation: int = 0,
    codec_options: dict[str, str] | None = None,
    **options: str,
) -> bytes:
    """Encodes frames (H, W, 3 or 4), shown at these ``times`` in seconds, or at a constant rate."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "film"  # in a file, since the option faststart reads it again
        _encode(str(path), frames, container, codec, pix_fmt, times, rate, rotation, codec_options or {}, options)
        return path.read_bytes()


def _encode(
    path: str,
    frames: Sequence[np.ndarray[Any, Any]],
    container: str,
    codec: str,
    pix_fmt: str,
    times: Sequence[float] | None,
    rate: int | Fraction,
    rotation: int,
    codec_options: dict[str, str],
    options: dict[str, str],
) -> None:
    with av.open(path, "w", format=container, options=options) as output:
        precise = {"crf": "8"} if codec == "libx264" else {}
        stream = output.add_stream(codec, rate=rate, options=precise | codec_options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        if codec in ("libvpx", "mpeg4"):
            stream.bit_rate = 2_000_000  # by default they blur the numbers
        stream.codec_context.time_base = Fraction(1, 1000) if times else 1 / Fraction(rate)
        if rotation:
            stream.set_display_rotation(rotation)
        for i, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgba" if array.shape[2] == 4 else "rgb24")
            frame.pts, frame.time_base = (
                (round(times[i] * 1000), Fraction(1, 1000)) if times else (i, 1 / Fraction(rate))
            )
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
