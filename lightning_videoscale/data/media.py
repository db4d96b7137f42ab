"""Videos and photographs: opening them safely, and what they show when they are decoded from end to end.

A file's name and header are hearsay. FFmpeg looks at the content to find out what it is, which a hostile file turns
against its reader: a playlist may name other files and servers. Only formats that hold their own pictures are opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from lightning_videoscale.data.shards import ShardError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

VIDEO_SUFFIXES = frozenset({"mp4", "m4v", "mov", "webm", "mkv", "avi"})
"""Extensions of members that are opened as videos."""

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "bmp"})
"""Extensions of members that are opened as photographs. What a file is, its content says."""

_VIDEO_FORMATS = ("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi")
_IMAGE_FORMATS = ("jpeg_pipe", "png_pipe", "webp_pipe", "bmp_pipe")
_MAX_PIXELS = 2**27  # a picture of 16 384 x 8 192; a small file can claim far more and take all memory
_OPTIONS = {
    "format_whitelist": ",".join(_VIDEO_FORMATS + _IMAGE_FORMATS),
    "protocol_whitelist": "none",
    "max_pixels": str(_MAX_PIXELS),
}


class MediaError(ValueError):
    """A file that does not decode, with the reason."""


@dataclass(frozen=True)
class Footage:
    """What decoding a file brought to light.

    Attributes:
        is_image: Whether it is a picture rather than a video.
        num_frames: Frames that were decoded.
        height: Rows of the upright picture.
        width: Columns likewise.
        fps: Frames per second on average; 0 for an image.
        duration: Seconds from the start of the first frame to the end of the last; 0 for an image.
    """

    is_image: bool
    num_frames: int
    height: int
    width: int
    fps: float
    duration: float


@contextmanager
def open_media(file: BinaryIO) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a file and its video stream, to be decoded by one thread.

    Raises:
        MediaError: If it is no video or picture of a known format, or breaks anywhere while it is open.
        ModuleNotFoundError: If PyAV is not installed.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Reading videos and images needs PyAV: pip install 'lightning-videoscale[video]'."
        ) from error
    try:
        with av.open(file, "r", options=_OPTIONS) as container:
            pictures = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
            if not pictures:
                kinds = sorted({stream.type for stream in container.streams})
                raise MediaError(f"it has no video stream (streams: {', '.join(kinds) or 'none'})")
            decoder: Any = pictures[0].codec_context
            if decoder is None:
                raise MediaError("it has a video stream of a codec that FFmpeg does not know")
            # Workers run side by side: threads of FFmpeg's own would fight over their cores.
            decoder.thread_count = 1
            yield container, pictures[0]
    except (MediaError, ShardError):
        raise
    # PyAV answers some impossible sizes, rates and names with errors of Python.
    except (av.FFmpegError, ValueError, ArithmeticError, MemoryError) as error:
        reason = error.strerror if isinstance(error, av.FFmpegError) else f"{type(error).__name__}: {error}"
        raise MediaError(f"it does not decode: {reason}") from error


def probe(file: BinaryIO) -> Footage:
    """Decodes a file from end to end, in bounded memory.

    Raises:
        MediaError: If it does not decode, shows nothing, holds damaged frames, or ends before its header says.
    """
    with open_media(file) as (container, stream):
        clock, height, width = FrameClock(stream), 0, 0
        num_frames, first, last, frame_length, end = 0, 0.0, 0.0, 0.0, 0.0
        for packet in container.demux():
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream is not stream:
                continue
            for frame in stream.decode(packet):
                if frame.is_corrupt:
                    raise MediaError(f"frame {num_frames} is damaged")
                last = clock.seconds(frame)
                if not num_frames:
                    first, (height, width) = last, upright_size(frame)
                num_frames += 1
                frame_length = float((frame.duration or 0) * (stream.time_base or 0))
        if not num_frames:
            raise MediaError("it has a video stream, but no frame could be decoded")
        if container.format.name in _IMAGE_FORMATS:
            return Footage(True, 1, height, width, 0.0, 0.0)
        interval = (last - first) / (num_frames - 1) if num_frames > 1 else frame_length or clock.interval
        duration = last - first + (frame_length or interval)
        if duration <= 0:
            raise MediaError("its frames have no timestamps and it states no frame rate")
        _check_whole(container, end, interval)
        return Footage(False, num_frames, height, width, num_frames / duration, duration)


class FrameClock:
    """Tells when a frame is shown, in seconds from the start of the stream.

    Frames without a timestamp follow one another at the stream's average rate.
    """

    def __init__(self, stream: VideoStream) -> None:
        rate = stream.average_rate or stream.guessed_rate
        self.interval = float(1 / rate) if rate else 0.0
        self._unit = float(stream.time_base or 1)
        self._origin = (stream.start_time or 0) * self._unit
        self._next = 0.0

    def seconds(self, frame: VideoFrame) -> float:
        """The moment at which a frame begins."""
        time = self._next if frame.pts is None else frame.time - self._origin
        self._next = time + self.interval
        return time

    def timestamp(self, seconds: float) -> int:
        """A moment in the units of the stream, for seeking."""
        return int((seconds + self._origin) / self._unit)

    def restart(self) -> None:
        """Begins again, for frames without timestamps."""
        self._next = 0.0


def upright_size(frame: VideoFrame) -> tuple[int, int]:
    """Height and width of a frame after the rotation that its display matrix or EXIF tag demands."""
    size = frame.height, frame.width
    return size[::-1] if quarter_turns(frame) % 2 else size


def quarter_turns(frame: VideoFrame) -> int:
    """Counter-clockwise quarter turns that set a frame upright."""
    return round(frame.rotation / 90)


def _check_whole(container: InputContainer, end: float, interval: float) -> None:
    # Formats whose index comes first decode up to the cut without complaint; what is missing shows in the clock.
    if container.duration is None:
        return
    stated = container.duration / 1e6 + (container.start_time or 0) / 1e6
    if stated - end > max(2.5 * interval, 0.02 * stated):
        raise MediaError(f"it ends early: its header says {stated:.2f} s and its content ends at {end:.2f} s")
