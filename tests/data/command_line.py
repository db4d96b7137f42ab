"""FFmpeg's own command line: films of every kind, and what they look like by its account."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np

FRAMES, HEIGHT, WIDTH, RATE = 150, 48, 80, 25
_BITS = 8

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def ffmpeg(*arguments: str, data: bytes = b"") -> bytes:
    """Runs the command line and returns what it writes to ``-``."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *arguments]
    return subprocess.run(command, input=data, check=True, capture_output=True).stdout


def painted(number: int) -> Pixels:
    """A frame (H, W, 3) with its number in the bits of its upper half, over a slope that moves."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    frame = np.stack([60 + x, 40 + 2 * y, 80 + (x + y + 2 * number) % 64], axis=-1).astype(np.uint8)
    side = WIDTH // _BITS
    for bit in range(_BITS):
        frame[4 : HEIGHT // 2, bit * side : (bit + 1) * side] = 190 if number >> bit & 1 else 60
    return frame


def number_of(frame: Pixels) -> int:
    """The number that a frame was painted with, if it was not turned."""
    side = WIDTH // _BITS
    blocks = frame[6 : HEIGHT // 2 - 2].reshape(-1, _BITS, side, 3)[:, :, 2:-2].mean(axis=(0, 2, 3))
    return sum(1 << bit for bit, brightness in enumerate(blocks) if brightness > 125)


@dataclass(frozen=True)
class Recipe:
    """How a film is made.

    Attributes:
        suffix: Its container.
        codec: What it is encoded with, and options.
        turn: Options that say how a player is to turn it, such as ``-display_rotation 90``.
        is_variable: Whether every seventh frame stays five times as long.
        offset: Seconds that it begins later than at zero.
        pix_fmt: How pixels are stored.
        colors: What its header says of their meaning.
        filters: What else it goes through before it is encoded.
    """

    suffix: str
    codec: str
    turn: str = ""
    is_variable: bool = False
    offset: float = 0.0
    pix_fmt: str = "yuv420p"
    colors: str = ""
    filters: str = "null"

    @property
    def times(self) -> list[float]:
        """When each frame is shown, in seconds from the first one."""
        return [(i + (4 * (i // 7) if self.is_variable else 0)) / RATE for i in range(FRAMES)]

    def make(self, folder: Path) -> Path:
        """Encodes the film."""
        file = folder / f"film.{self.suffix}"
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{WIDTH}x{HEIGHT}", "-r", str(RATE), "-i", "-"]
        pace = "setpts=(N+4*floor(N/7))/(25*TB)" if self.is_variable else "null"
        how = [*f"-fps_mode passthrough -c:v {self.codec} -pix_fmt {self.pix_fmt}".split(), *self.colors.split()]
        late = ["-output_ts_offset", str(self.offset)] if self.offset else []
        made = folder / f"made.{'mov' if self.turn else self.suffix}"
        ffmpeg(
            *raw,
            "-vf",
            f"{pace},{self.filters}",
            *how,
            *late,
            str(made),
            data=b"".join(painted(i).tobytes() for i in range(FRAMES)),
        )
        if not self.turn:
            return made
        ffmpeg(*self.turn.split(), "-i", str(made), "-c", "copy", str(file))
        return file


def decoded(file: Path, height: int, width: int) -> Pixels:
    """All frames (N, H, W, 3) of a film that is shown at this size, as the command line turns and colors them."""
    scale = f"scale={width}:{height}:in_range=auto:in_color_matrix=auto:out_range=full:flags=bilinear"
    options = ["-fps_mode", "passthrough", "-vf", scale, "-f", "rawvideo", "-pix_fmt", "rgb24"]
    return np.frombuffer(ffmpeg("-i", str(file), *options, "-"), np.uint8).reshape(-1, height, width, 3)
