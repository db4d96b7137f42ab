"""A film: frames in the order and at the times they are shown, from the start or from a key frame on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_LEAD = 2.0
"""Seconds that a second attempt seeks further back: some formats are searched by when packets are decoded."""

_TS_DISCONT = 0x200  # flag of FFmpeg's formats whose clock may begin anew within a file
_BACK, _AHEAD = 1.0, 10.0
"""Seconds between two frames that nobody means in such formats; FFmpeg's command line goes by as many ahead."""

MAX_LEADING = 16
"""Frames at most that are decoded after a key frame and shown before it, in all codecs."""


class MediaError(ValueError):
    """A file that does not decode, with the reason."""


class Seek(NamedTuple):
    """A key frame from which decoding gives what decoding from the start gives, to the last bit.

    Attributes:
        stamp: Timestamp of its packet, in ticks of the stream.
        begin: When it is shown, in ticks from the first frame of the film.
    """

    stamp: int
    begin: int


class Shown(NamedTuple):
    """A frame in its turn.

    Attributes:
        begin: When it is shown, in ticks from the first frame.
        length: For how long, in ticks; 0 if the file does not say.
        frame: The picture.
        key: Timestamp of its packet if that is marked as a key frame.
    """

    begin: int
    length: int
    frame: VideoFrame
    key: int | None = None


class Film(Protocol):
    """What a file shows.

    Attributes:
        tick: Seconds of a tick.
        interval: Seconds between frames on average, by the header; 0 if it does not tell.
        aspect: Width of a pixel over its height.
        may_be_still: Whether one frame of it is a photograph rather than a short video.
    """

    tick: float
    interval: float
    aspect: Fraction
    may_be_still: bool

    def frames(self, seek: Seek | None = None) -> Iterator[Shown]:
        """Yields all frames, or those from a key frame on; to be called once."""
        ...

    def missing(self) -> tuple[float, float]:
        """When its header says that it ends, and when it ended, in seconds; to be asked after the last frame."""
        ...


class StreamFilm:
    """A video stream of a container, as a `Film`.

    Args:
        container: The file, open.
        stream: Which of its streams.
        decoder: What decodes it, mostly the stream's own.
        may_be_still: See `Film`.
    """

    def __init__(
        self, container: InputContainer, stream: VideoStream, decoder: VideoCodecContext, may_be_still: bool
    ) -> None:
        rate = stream.average_rate or stream.guessed_rate
        self.tick = float(stream.time_base or 1)
        self.interval = float(1 / rate) if rate else 0.0
        self.may_be_still = may_be_still
        # The resolution of a photograph says how large it prints, nothing of its shape.
        self.aspect = Fraction(1) if may_be_still else stream.sample_aspect_ratio or Fraction(1)
        self._container = container
        self._stream = stream
        self._decoder = decoder
        self._ends: dict[int, int] = {}  # of each stream, in its own ticks
        # AVI knows when packets are decoded and not when frames are shown, which FFmpeg guesses wrong where the two
        # orders differ. There the k-th frame is shown when the k-th packet is due.
        self._is_counted = container.format.name == "avi" and bool(stream.codec_context.has_b_frames)
        self._due: deque[int] = deque()
        self._may_be_joined = bool(container.format.flags & _TS_DISCONT)

    def frames(self, seek: Seek | None = None) -> Iterator[Shown]:
        """Yields all frames, or those from a key frame on.

        Raises:
            MediaError: If there is no such key frame.
        """
        first: int | None = None
        last = 0 if seek is None else seek.begin
        step = max(1, round(self.interval / self.tick))
        for number, frame in enumerate(self._decoded(self._packets() if seek is None else self._packets_from(seek))):
            stamp = self._due.popleft() if self._is_counted and self._due else frame.pts
            if first is None:
                # What is shown before the key frame that was sought may refer to frames before it.
                if seek is not None and _key(frame) != seek.stamp:
                    if number == MAX_LEADING:
                        break
                    continue
                first = (last if stamp is None else stamp) - last
            else:
                passed = step if stamp is None else stamp - first - last
                if self._is_joined(passed):
                    first += passed - step
                    passed = step
                # Some frames have times that cannot be, as FFmpeg guesses them in MPEG-PS.
                last += passed if passed > 0 else step
            length = 0 if self._is_counted else frame.duration or 0
            yield Shown(last, length, frame, _key(frame))

    def missing(self) -> tuple[float, float]:
        """When its header says that it ends, and when it ended, in seconds."""
        container = self._container
        # Matroska counts from zero, the others from their first packet.
        start = 0 if "matroska" in container.format.name else container.start_time or 0
        ends = (float(end * (container.streams[number].time_base or 0)) for number, end in self._ends.items())
        return ((container.duration or 0) + start) / 1e6, max(ends, default=0.0)

    def _is_joined(self, ticks: int) -> bool:
        """Whether so much between two frames says that recordings were joined there, each with a clock of its own."""
        return self._may_be_joined and not -_BACK < ticks * self.tick < _AHEAD

    def _packets(self) -> Iterator[Packet[Any]]:
        for packet in self._container.demux():
            if packet.pts is not None:
                end, number = packet.pts + (packet.duration or 0), packet.stream_index
                self._ends[number] = max(self._ends.get(number, 0), end)
            if packet.stream is self._stream:
                yield packet

    def _packets_from(self, seek: Seek) -> Iterator[Packet[Any]]:
        """Yields packets from the key frame's on, wherever the container's own seeking lands."""
        for target in (seek.stamp, seek.stamp - round(_LEAD / self.tick), None):
            if target is None:
                self._container.seek(0)
            else:
                self._container.seek(target, stream=self._stream, backward=True)
            packets = self._packets()
            for packet in packets:
                if packet.is_keyframe and _stamp(packet) == seek.stamp:
                    yield packet
                    yield from packets
                    return
                if target is not None and packet.dts is not None and packet.dts > seek.stamp:
                    break
        raise MediaError(f"the key frame at {seek.begin * self.tick:.3f} s is no longer where it was")

    def _decoded(self, packets: Iterator[Packet[Any]]) -> Iterator[VideoFrame]:
        from av.error import InvalidDataError

        has_begun = False
        for packet in packets:
            has_begun = has_begun or packet.is_keyframe
            # The decoder hands it on to the frame. In a tuple of its own, since PyAV goes by addresses, which small
            # numbers share.
            if packet.is_keyframe:
                packet.opaque = (_stamp(packet),)
            if self._is_counted and packet.size and packet.dts is not None:
                self._due.append(packet.dts)
            try:
                frames = self._decoder.decode(packet)
            except InvalidDataError:
                # A recording may begin in the middle of a group of pictures, which shows nothing.
                if has_begun:
                    raise
                continue
            yield from frames


def _stamp(packet: Packet[Any]) -> int | None:
    return packet.dts if packet.pts is None else packet.pts


def _key(frame: VideoFrame) -> int | None:
    opaque: Any = frame.opaque
    return opaque[0] if opaque else None
