"""What a video or photograph shows when it is decoded from end to end, and where else decoding may begin.

A key frame is a promise of whoever wrote the file. After some come frames that refer to frames before them (open
groups of pictures, intra refresh, wrong flags), which then decode to garbage without an error.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from lightning_videoscale.data.shards.film import MAX_LEADING, MediaError, Seek
from lightning_videoscale.data.shards.media import open_media
from lightning_videoscale.data.shards.pictures import shown_size

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_SEEK_DISTANCE = 32
"""Frames between the key frames that are kept; fewer are as soon decoded as sought."""


@dataclass(frozen=True)
class Footage:
    """What decoding a file brought to light.

    Attributes:
        is_image: Whether it is a picture rather than a video.
        num_frames: Frames that were decoded.
        height: Rows of the picture as it is shown: upright, with square pixels.
        width: Columns likewise.
        fps: Frames per second on average; 0 for an image.
        duration: Seconds from the start of the first frame to the end of the last; 0 for an image.
        seeks: Where decoding may begin beside the start, in order.
    """

    is_image: bool
    num_frames: int
    height: int
    width: int
    fps: float
    duration: float
    seeks: tuple[Seek, ...] = ()


class _Print(NamedTuple):
    """When a frame begins, and a hash of its pixels."""

    begin: int
    pixels: int


class _KeyFrame(NamedTuple):
    """A frame that is marked as a key frame, and its place among the prints."""

    seek: Seek
    place: int


def probe(file: BinaryIO) -> Footage:
    """Decodes a file from end to end, in bounded memory, and again from its key frames.

    Raises:
        MediaError: If it does not decode, shows nothing, holds damaged frames, or ends before its header says.
    """
    keys: list[_KeyFrame] = []
    prints: list[_Print] = []  # from the first of them on
    with open_media(file) as film:
        num_frames, height, width, last, frame_length = 0, 0, 0, 0.0, 0.0
        for begin, length, frame, key in film.frames():
            if frame.is_corrupt:
                raise MediaError(f"frame {num_frames} is damaged")
            if not num_frames:
                height, width = shown_size(frame, film.aspect)
            if key is not None and num_frames >= _SEEK_DISTANCE:
                keys.append(_KeyFrame(Seek(key, begin), len(prints)))
            if keys:
                prints.append(_Print(begin, _hash(frame)))
            num_frames += 1
            last, frame_length = begin * film.tick, length * film.tick
        if not num_frames:
            raise MediaError("it has a video stream, but no frame could be decoded")
        if num_frames == 1 and film.may_be_still:
            return Footage(True, 1, height, width, 0.0, 0.0)
        interval = last / (num_frames - 1) if num_frames > 1 else frame_length or film.interval
        duration = last + (frame_length or interval)
        if duration <= 0:
            raise MediaError("its frames have no timestamps and it states no frame rate")
        stated, end = film.missing()
        # Formats whose index comes first decode up to the cut without complaint; what is missing shows in the clock.
        if stated - end > max(2.5 * interval, 0.02 * stated):
            raise MediaError(f"it ends early: its header says {stated:.2f} s and its content ends at {end:.2f} s")
    return Footage(False, num_frames, height, width, num_frames / duration, duration, _sound_seeks(file, keys, prints))


def _sound_seeks(file: BinaryIO, keys: list[_KeyFrame], prints: list[_Print]) -> tuple[Seek, ...]:
    """Which key frames give the frames that decoding from the start gave, up to the next such key frame and at it.

    From there on, that one's frames depend on nothing before. No file takes more than twice the time of its decoding.
    """
    sound: list[Seek] = []
    end = left = len(prints)
    for seek, place in reversed(keys):
        expected = prints[place : end + 1]
        if place > end - _SEEK_DISTANCE or len(expected) > left:
            continue
        same = _same_frames(file, seek, expected)
        if same == len(expected):
            sound.append(seek)
            end = place
        left -= max(same - 1, MAX_LEADING)
    return tuple(reversed(sound))


def _same_frames(file: BinaryIO, seek: Seek, expected: list[_Print]) -> int:
    """How many frames from a key frame on are as expected."""
    same = 0
    with suppress(MediaError), open_media(file) as film:  # decoding from the start was no error
        for begin, _, frame, _ in film.frames(seek):
            if same == len(expected) or frame.is_corrupt or _Print(begin, _hash(frame)) != expected[same]:
                break
            same += 1
    return same


def _hash(frame: VideoFrame) -> int:
    """CRC-32 of what is visible: the memory at the end of a plane's lines may hold anything."""
    if not frame.format.is_planar:
        frame = frame.reformat(format="gbrap", threads=1)
    crc = 0
    for number, plane in enumerate(frame.planes):
        visible = sum(c.width * -(-c.bits // 8) for c in frame.format.components if c.plane == number)
        lines = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, -1)
        crc = zlib.crc32(np.ascontiguousarray(lines[:, :visible]).data, crc)
    return crc
