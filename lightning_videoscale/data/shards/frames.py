"""Pixels: the planned part of a video or photograph, at the planned size and rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_videoscale.data.shards.film import Film, MediaError, Seek
from lightning_videoscale.data.shards.media import open_media
from lightning_videoscale.data.shards.pictures import shown, shown_size

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


def decode_clip(
    file: BinaryIO,
    num_frames: int,
    height: int,
    width: int,
    start: float = 0.0,
    fps: float = 0.0,
    seeks: Sequence[Seek] = (),
) -> torch.Tensor:
    """Decodes part of a video, or a photograph.

    Frame k shows what is on display k / fps seconds after ``start``, by the frames' own timestamps, so that a variable
    rate keeps its pace. Pictures are set upright, stretched until their pixels are square, scaled until they cover
    height × width, and cropped around their centre. Memory holds the result and one frame.

    Args:
        file: The whole file, seekable.
        num_frames: Frames F to return.
        height: Rows H.
        width: Columns W.
        start: Seconds from the first frame.
        fps: Frames per second; may be 0 for one frame.
        seeks: Where decoding may begin beside the start, in order, as `probe` has found for this file.

    Returns:
        (3, F, H, W), uint8, RGB.

    Raises:
        MediaError: If it does not decode, ends before the last frame that is asked for, a frame of those is damaged, or
            cannot be shown as it is meant.
    """
    with open_media(file) as film:
        # Containers round timestamps: a frame that begins a quarter of a frame later counts as begun.
        slack = 0.25 * min(1 / fps if fps else film.interval, film.interval)
        moments = start + np.arange(num_frames) / (fps or 1.0) + slack
        clip = np.empty((3, num_frames, height, width), np.uint8)
        before = [seek for seek in seeks if seek.begin * film.tick <= start + slack]
        last: VideoFrame | None = None
        for k, frame in enumerate(_on_display(film, before[-1] if before else None, moments, 1 / fps if fps else 0.0)):
            # Colours are parted while the frame is in the cache: it takes half of the time that it takes afterwards.
            same = frame is last
            clip[:, k] = clip[:, k - 1] if same else shown(frame, film.aspect, height, width).transpose(2, 0, 1)
            last = frame
    return torch.from_numpy(clip)


def decode_image(file: BinaryIO) -> torch.Tensor:
    """Decodes a photograph at its own size: (3, H, W), uint8, RGB, upright.

    Raises:
        MediaError: If it does not decode.
    """
    with open_media(file) as film:
        for _, _, frame, _ in film.frames():
            picture = shown(frame, film.aspect, *shown_size(frame, film.aspect))
            return torch.from_numpy(picture.copy()).permute(2, 0, 1)
    raise MediaError("it holds no picture")


def _on_display(film: Film, seek: Seek | None, moments: NDArray[np.float64], step: float) -> Iterator[VideoFrame]:
    """Yields the frame on display at each moment."""
    on_display: VideoFrame | None = None
    begun, length, k = 0.0, 0.0, 0
    for begin, ticks, frame, _ in film.frames(seek):
        time = begin * film.tick
        while on_display is not None and k < len(moments) and moments[k] < time:
            yield _sound(on_display, begun)
            k += 1
        if k == len(moments):
            return
        on_display, begun, length = frame, time, ticks * film.tick
    if on_display is None:
        raise MediaError("no frame could be decoded")
    end = begun + max(film.interval, length)
    for moment in moments[k:]:
        # A step's worth of tolerance: plans are made from average rates.
        if moment > end + max(film.interval, step):
            raise MediaError(f"it ends at {end:.3f} s and the frame at {moment:.3f} s was asked for")
        yield _sound(on_display, begun)


def _sound(frame: VideoFrame, time: float) -> VideoFrame:
    if frame.is_corrupt:
        raise MediaError(f"the frame at {time:.3f} s is damaged")
    return frame
