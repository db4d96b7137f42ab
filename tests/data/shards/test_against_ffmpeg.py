"""Decoded pixels beside those of FFmpeg's own command line: the right frames, upright, stretched, in the right colours.

Films of every kind are cut at every seventh frame. Frames are painted with their numbers: a wrong one cannot pass.
"""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lightning_videoscale.data.shards.frames import decode_clip
from lightning_videoscale.data.shards.probing import probe
from tests.data.command_line import FRAMES, RATE, Recipe, decoded, number_of

X264 = "libx264 -preset veryfast -crf 8 -x264-params scenecut=0"
X265 = "libx265 -preset superfast -crf 8 -x265-params log-level=none:scenecut=0:keyint=20:min-keyint=20"
OPEN = f"{X264}:keyint=20:min-keyint=20:open-gop=1:bframes=3:b-adapt=0"
H264 = (
    f"{X264}:keyint=20:min-keyint=20",
    OPEN,
    f"{X264}:keyint=20:min-keyint=20:bframes=5:b-pyramid=normal:b-adapt=0",
    f"{X264}:keyint=20:intra-refresh=1:bframes=0",
    f"{X264}:keyint=250:bframes=0",
)
H265 = (f"{X265}:open-gop=1:bframes=3:b-adapt=0", f"{X265}:open-gop=0")
MPEG2 = ("mpeg2video -q:v 2 -g 12", "mpeg2video -q:v 2 -g 12 -bf 2")
MPEG4 = ("mpeg4 -q:v 2 -g 12", "mpeg4 -q:v 2 -g 12 -bf 2")
AV1 = "libaom-av1 -crf 10 -g 20 -cpu-used 8 -row-mt 0 -usage realtime"
VP8, VP9 = (
    f"{codec} -crf 8 -b:v 2M -g 20 -deadline realtime -cpu-used 8 -auto-alt-ref 1 -lag-in-frames 10"
    for codec in ("libvpx", "libvpx-vp9")
)
MJPEG = "mjpeg -q:v 2"
ENCODED = {
    "mp4": (*H264, *H265, *MPEG4, VP9, AV1),
    "mov": (*H264, *H265, MJPEG),
    "mkv": (*H264, *H265, *MPEG2, *MPEG4, VP8, VP9, AV1),
    "webm": (VP8, VP9, AV1),
    "avi": (*H264, *MPEG2, *MPEG4, VP8, MJPEG),
    "ts": (*H264, *H265, *MPEG2),
    "flv": (*H264, "flv -q:v 2 -g 20"),
    "mpg": MPEG2,
    "ogv": ("libtheora -q:v 10 -g 20",),
    "gif": ("gif",),
    "webp": ("libwebp_anim -lossless 1",),
}
PIX_FMTS = {MJPEG: "yuvj420p", "gif": "rgb8", "libwebp_anim -lossless 1": "bgra"}
PACED = {"avi", "mpg", "ogv"}  # their frames come at one rate

PACES = [
    Recipe(suffix, codec, is_variable=is_variable, offset=offset, pix_fmt=PIX_FMTS.get(codec, "yuv420p"))
    for suffix, codecs in ENCODED.items()
    for codec, is_variable, offset in product(codecs, (False, True), (0.0, 3.7))
    if not (is_variable and suffix in PACED) and not (offset and suffix == "avi")  # its films begin at zero
]
TURNS = [
    Recipe(suffix, OPEN, turn=f"-display_rotation {degrees} {flip}")
    for suffix, degrees, flip in product(
        ("mp4", "mov", "mkv"),
        (0, 90, 180, 270),
        ("", "-display_hflip", "-display_vflip", "-display_hflip -display_vflip"),
    )
]
PIXELS = [
    Recipe(suffix, codec, turn, filters=f"setsar={pixel}", pix_fmt="yuv444p" if turn else "yuv420p")
    for suffix, codec, turn in (
        *(product(("mp4", "mkv"), (OPEN,), ("", "-display_rotation 90"))),
        *(product(("avi", "ts", "flv"), (OPEN,), ("",))),
        ("mpg", MPEG2[0], ""),
    )
    for pixel in ("4/3", "3/4", "16/11", "32/27", "1/2")
]
COLORS = [
    Recipe("mkv", codec, pix_fmt=pix_fmt, colors=f"{of_range} {of_matrix}".strip())
    for of_range, of_matrix, (codec, pix_fmt) in product(
        ("", "-color_range tv", "-color_range pc"),
        ("", *(f"-colorspace {name}" for name in ("bt709", "smpte170m", "bt470bg", "bt2020nc", "fcc", "smpte240m"))),
        (
            *product((H264[0],), ("yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv422p10le", "gray")),
            *product(("ffv1",), ("yuva420p", "yuv444p12le", "gbrp")),
        ),
    )
]
MATRIX = [*PACES, *TURNS, *PIXELS, *COLORS]
SAMPLE = {
    *MATRIX[::67],
    Recipe("avi", OPEN),
    Recipe("flv", OPEN, is_variable=True),
    Recipe("ts", H265[0], offset=3.7),
    Recipe("mpg", MPEG2[1]),
    Recipe("mp4", OPEN, turn="-display_rotation 90 -display_hflip"),
}


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=() if recipe in SAMPLE else pytest.mark.full, id=str(recipe)) for recipe in MATRIX],
)
def test_frames_are_what_the_command_line_shows(recipe: Recipe, tmp_path: Path) -> None:
    file = recipe.make(tmp_path)
    data = file.read_bytes()
    footage = probe(io.BytesIO(data))
    expected = decoded(file, footage.height, footage.width)
    assert len(expected) == footage.num_frames == FRAMES
    if not recipe.turn and "setsar" not in recipe.filters:
        assert [number_of(frame) for frame in expected] == list(range(FRAMES))
    assert np.abs(np.diff(expected.astype(np.int16), axis=0)).mean(axis=(1, 2, 3)).min() > 3, "frames differ"
    begins = [*recipe.times, recipe.times[-1] + 1 / RATE]
    for number in range(0, FRAMES, 7):
        middle = (begins[number] + begins[number + 1]) / 2
        cut = decode_clip(io.BytesIO(data), 1, footage.height, footage.width, middle, seeks=footage.seeks)
        error = np.abs(cut[:, 0].permute(1, 2, 0).numpy().astype(int) - expected[number]).mean()
        assert error <= 1, number
