"""Sampled videos as files: an mp4, and a strip of frames."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

_FRAMES = 8
_HEIGHT = 240


def check_writers() -> None:
    """Looks for what writes videos and pictures.

    Raises:
        ModuleNotFoundError: If PyAV or Pillow is not installed.
    """
    missing = [name for module, name in (("av", "PyAV"), ("PIL", "Pillow")) if not importlib.util.find_spec(module)]
    if missing:
        raise ModuleNotFoundError(
            f"SampleVideos writes files with PyAV and Pillow, and {missing} not installed: "
            "pip install 'lightning-videoscale[video]'."
        )


def frames_of(output: Any) -> np.ndarray:
    """Returns the first video of a pipeline's output: uint8, (F, H, W, 3).

    Args:
        output: With ``frames``: floats in [0, 1] of shape (B, F, H, W, 3), or lists of PIL images.

    Raises:
        TypeError: If there are no such frames.
    """
    videos = getattr(output, "frames", None)
    if videos is None:
        raise TypeError(f"The pipeline returned {type(output).__name__}, which has no `frames`: is it one for videos?")
    frames = np.stack([np.asarray(frame) for frame in videos[0]])
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise TypeError(f"The pipeline's frames have shape {frames.shape}, not (F, H, W, 3): leave out output_type.")
    if frames.dtype != np.uint8:
        frames = (np.nan_to_num(frames).clip(0, 1) * 255).round().astype(np.uint8)
    return frames


def write_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Writes an mp4 (H.264) of uint8 frames (F, H, W, 3)."""
    import av

    height, width = frames.shape[1:3]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "18"})
        stream.height, stream.width = height, width
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def strip_of(frames: np.ndarray) -> np.ndarray:
    """Returns up to eight frames of a video side by side, from first to last, at most 240 pixels high.

    Args:
        frames: uint8, (F, H, W, 3).

    Returns:
        uint8, (H', W', 3).
    """
    from PIL import Image

    chosen = frames[np.linspace(0, len(frames) - 1, min(_FRAMES, len(frames))).round().astype(int)]
    height, width = chosen.shape[1:3]
    if height > _HEIGHT:
        size = max(1, round(width * _HEIGHT / height)), _HEIGHT
        chosen = np.stack([np.asarray(Image.fromarray(frame).resize(size)) for frame in chosen])
    return np.concatenate(list(chosen), axis=1)


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Writes a png of uint8 (H, W, 3)."""
    from PIL import Image

    Image.fromarray(picture).save(path)


def read_picture(path: Path) -> np.ndarray:
    """Returns what `write_picture` wrote."""
    from PIL import Image

    return np.asarray(Image.open(path))


def read_video(path: Path) -> np.ndarray:
    """Returns the frames of a video: uint8, (F, H, W, 3)."""
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
