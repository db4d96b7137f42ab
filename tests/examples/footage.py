"""Videos made on the spot."""

from pathlib import Path

import av
import numpy as np


def moving_square(frames: int, height: int, width: int) -> list[np.ndarray]:
    """A red square that travels to the right over a smooth background: uint8 frames (H, W, 3)."""
    y, x = np.mgrid[0:height, 0:width]
    background = np.stack([40 + 0 * x, 160 * x / width, 160 * y / height], axis=-1)
    clip = [background.copy() for _ in range(frames)]
    for index, frame in enumerate(clip):
        left = index * (width // 2) // frames
        frame[: height // 2, left : left + width // 4] = (230, 20, 20)
    return [frame.astype(np.uint8) for frame in clip]


def write_video(
    path: Path, frames: list[np.ndarray], codec: str = "libx264", rotation: int = 0, **options: str
) -> Path:
    """Encodes frames; `rotation` (counter-clockwise degrees) is what a player is told to turn them by."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for array in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    return path
