"""Which key frames are fit for seeking, and that no cut of a film whose key frames lie is wrong."""

from __future__ import annotations

import io
from collections.abc import Callable

import av
import numpy as np
import pytest
import torch

from lightning_videoscale.data.shards.film import Seek
from lightning_videoscale.data.shards.frames import decode_clip
from lightning_videoscale.data.shards.probing import probe
from tests.data.films import film

FRAMES = 200


def _scenery(number: int) -> np.ndarray:
    """A frame of which much moves, so that what is predicted from a wrong frame looks wrong."""
    y, x = np.mgrid[0:48, 0:64]
    picture = 128 + 60 * np.sin((x + 3 * number) / 5) + 60 * np.cos((y * x / 40 - 2 * number) / 4)
    return np.stack([picture, picture[::-1], 255 - picture], axis=-1).astype(np.uint8)


def _film(codec: str = "libx264", container: str = "mp4", **options: str) -> bytes:
    return film([_scenery(i) for i in range(FRAMES)], container, codec, codec_options=options)


def _x264(parameters: str) -> bytes:
    return _film(**{"x264-params": f"keyint=20:min-keyint=20:scenecut=0:{parameters}"})


def _lying(data: bytes) -> bytes:
    """The same film with every fifth packet marked as a key frame."""
    copy = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(copy, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.dts is not None:
                packet.stream = stream
                packet.is_keyframe = number % 5 == 0
                target.mux(packet)
    return copy.getvalue()


def _frame(data: bytes, number: int, seeks: tuple[Seek, ...] = ()) -> torch.Tensor:
    return decode_clip(io.BytesIO(data), 1, 48, 64, (number + 0.5) / 25, seeks=seeks)


FILMS: dict[str, Callable[[], bytes]] = {
    "closed": lambda: _x264("open-gop=0"),
    "open": lambda: _x264("open-gop=1:bframes=3:b-adapt=0"),
    "refresh": lambda: _x264("intra-refresh=1:bframes=0"),
    "lying": lambda: _lying(_x264("bframes=2:b-adapt=0")),
    "lying mpeg4": lambda: _lying(_film("mpeg4", g="40")),
    "mpeg2": lambda: _film("mpeg2video", "mpeg", g="12", bf="2"),
    "hevc": lambda: _film("libx265", **{"x265-params": "log-level=none:keyint=20:min-keyint=20:bframes=3:open-gop=1"}),
}


@pytest.mark.parametrize("kind", FILMS)
def test_no_cut_is_wrong_and_sound_key_frames_are_used(kind: str) -> None:
    data = FILMS[kind]()
    seeks = probe(io.BytesIO(data)).seeks
    whole = decode_clip(io.BytesIO(data), FRAMES, 48, 64, fps=25.0)
    for number in range(0, FRAMES, 7):
        assert torch.equal(_frame(data, number, seeks)[:, 0], whole[:, number]), number
    assert bool(seeks) == (kind != "refresh")


def test_a_lie_that_is_believed_is_seen() -> None:
    """What is marked as a key frame and is none decodes to garbage, and no error says so."""
    data = FILMS["lying mpeg4"]()
    lie = Seek(65 * 512, 65 * 512)
    assert (_frame(data, 65, (lie,)).float() - _frame(data, 65).float()).abs().mean() > 20


def test_key_frames_are_tried_where_they_are_far_apart() -> None:
    """Of key frames every 20 frames, those with at least 32 frames before the next one that is kept, or the end."""
    seeks = probe(io.BytesIO(film([_scenery(i) for i in range(300)], codec_options={"g": "20"}))).seeks
    assert [seek.begin * 25 // 12_800 for seek in seeks] == list(range(60, 300, 40))
    assert probe(io.BytesIO(film([_scenery(i) for i in range(50)]))).seeks == ()


def test_a_key_frame_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"key frame at 4\.000 s"):
        _frame(FILMS["closed"](), 120, (Seek(51_201, 51_200),))
