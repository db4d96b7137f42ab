"""Pixels: the planned part of a video or photograph, at the planned size and rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_videoscale.data.media import FrameClock, MediaError, open_media, quarter_turns, upright_size

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_Pixels = NDArray[np.uint8]


def decode_clip(
    file: BinaryIO, num_frames: int, height: int, width: int, start: float = 0.0, fps: float = 0.0
) -> torch.Tensor:
    """Decodes part of a video, or a photograph.

    Frame k shows what is on display k / fps seconds after ``start``, by the frames' own timestamps, so that a variable
    rate keeps its pace. Pictures are set upright, scaled until they cover height × width, and cropped around their
    centre. Decoding begins at the key frame before ``start``; memory holds the result and one frame.

    Args:
        file: The whole file, seekable.
        num_frames: Frames F to return.
        height: Rows H.
        width: Columns W.
        start: Seconds from the first frame.
        fps: Frames per second; may be 0 for one frame.

    Returns:
        (3, F, H, W), uint8, RGB.

    Raises:
        MediaError: If it does not decode, ends before the last frame that is asked for, or a frame of those is damaged.
    """
    with open_media(file) as (container, stream):
        clock = FrameClock(stream)
        # Containers round timestamps: a frame that begins a quarter of a frame later counts as begun.
        slack = 0.25 * min(1 / fps if fps else clock.interval, clock.interval)
        moments = start + np.arange(num_frames) / (fps or 1.0) + slack
        clip = np.empty((num_frames, height, width, 3), np.uint8)
        frames = _frames_from(container, stream, clock, start + slack)
        shown = _on_display(frames, moments, clock.interval, step=max(clock.interval, 1 / fps if fps else 0.0))
        last: VideoFrame | None = None
        for k, frame in enumerate(shown):
            if frame is not last:
                clip[k] = _upright_cover(frame, height, width)
            else:
                clip[k] = clip[k - 1]
            last = frame
    return torch.from_numpy(clip).permute(3, 0, 1, 2)


def decode_image(file: BinaryIO) -> torch.Tensor:
    """Decodes a photograph at its own size: (3, H, W), uint8, RGB, upright.

    Raises:
        MediaError: If it does not decode.
    """
    with open_media(file) as (container, stream):
        for frame in container.decode(stream):
            return torch.from_numpy(_upright_cover(frame, *upright_size(frame)).copy()).permute(2, 0, 1)
    raise MediaError("it holds no picture")


def _frames_from(
    container: InputContainer, stream: VideoStream, clock: FrameClock, moment: float
) -> Iterator[tuple[float, VideoFrame]]:
    """Yields frames and their times, beginning at or before ``moment``."""
    if moment > clock.interval:
        container.seek(clock.timestamp(moment), stream=stream, backward=True)
        frames = container.decode(stream)
        first = next(frames, None)
        if first is not None and first.pts is not None and clock.seconds(first) <= moment:
            yield clock.seconds(first), first
            yield from ((clock.seconds(frame), frame) for frame in frames)
            return
        # Without an index, or with a wrong one, seeking may land too late: then all of it is decoded.
        container.seek(0)
        clock.restart()
    yield from ((clock.seconds(frame), frame) for frame in container.decode(stream))


def _on_display(
    frames: Iterator[tuple[float, VideoFrame]], moments: NDArray[np.float64], interval: float, step: float
) -> Iterator[VideoFrame]:
    """Yields the frame on display at each moment."""
    shown: VideoFrame | None = None
    begun, k = 0.0, 0
    for time, frame in frames:
        while shown is not None and k < len(moments) and moments[k] < time:
            yield _sound(shown, begun)
            k += 1
        if k == len(moments):
            return
        shown, begun = frame, time
    if shown is None:
        raise MediaError("no frame could be decoded")
    end = begun + max(interval, float(shown.duration * shown.time_base) if shown.time_base else 0.0)
    for moment in moments[k:]:
        # A step's worth of tolerance: plans are made from average rates.
        if moment > end + step:
            raise MediaError(f"it ends at {end:.3f} s and the frame at {moment:.3f} s was asked for")
        yield _sound(shown, begun)


def _sound(frame: VideoFrame, time: float) -> VideoFrame:
    if frame.is_corrupt:
        raise MediaError(f"the frame at {time:.3f} s is damaged")
    return frame


def _upright_cover(frame: VideoFrame, height: int, width: int) -> _Pixels:
    """Returns a frame as (height, width, 3): scaled to cover this size, cropped around its centre, upright."""
    turns = quarter_turns(frame)
    if turns % 2:
        height, width = width, height
    scale = max(height / frame.height, width / frame.width)
    rows, columns = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
    has_alpha = any(component.is_alpha for component in frame.format.components)
    picture = frame.reformat(columns, rows, "rgba" if has_alpha else "rgb24", threads=1)
    top, left = (rows - height) // 2, (columns - width) // 2
    pixels: Any = picture.to_ndarray()[top : top + height, left : left + width]
    if has_alpha:
        # Over black, as players show it: what lies under transparent pixels was never meant to be seen.
        pixels = (pixels[..., :3].astype(np.uint16) * pixels[..., 3:] // 255).astype(np.uint8)
    return np.rot90(pixels, k=turns)
