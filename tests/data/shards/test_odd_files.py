"""Videos and pictures as the world has them: cut, cropped, joined, transparent, of several streams."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.frames import decode_clip, decode_image
from lightning_videoscale.data.shards.probing import probe
from tests.data.command_line import FRAMES, RATE, Recipe, decoded, ffmpeg
from tests.data.films import film, numbered, numbers

X264 = "libx264 -preset veryfast -crf 8"


def _noise(frames: int = 1) -> list[Image.Image]:
    noise = np.random.default_rng(0).integers(0, 255, (frames, 48, 64, 3), np.uint8)
    return [Image.fromarray(frame) for frame in noise]


@pytest.mark.parametrize("kind", ["JPEG", "progressive", "GIF", "animated"])
def test_pictures_that_were_cut_are_refused_and_what_follows_a_picture_is_nothing(kind: str) -> None:
    (first, *others), file = _noise(4 if kind == "animated" else 1), io.BytesIO()
    if kind in ("JPEG", "progressive"):
        first.save(file, "JPEG", progressive=kind == "progressive")
    else:
        first.save(file, "GIF", save_all=True, append_images=others)
    whole = file.getvalue()
    for kept in (0.1, 0.5, 0.9):
        with pytest.raises(MediaError, match=r"does not decode|ends early"):
            probe(io.BytesIO(whole[: int(kept * len(whole))]))
    expected = decode_image(file)
    for data in (whole + b"\x12\x34" * 99, whole[:-1]):
        assert (decode_image(io.BytesIO(data)) == expected).all()


def test_titles_may_be_in_any_encoding() -> None:
    data = film([numbered(i) for i in range(3)])
    assert b"VideoHandler" in data
    odd = data.replace(b"VideoHandler", b"Vid\xe9oHandler")
    assert numbers(decode_clip(io.BytesIO(odd), 3, 48, 64, fps=25.0)) == [0, 1, 2]


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_transparent_webm_is_over_black(codec: str) -> None:
    frame = np.full((64, 64, 4), 200, np.uint8)
    frame[:, :32, 3], frame[:, 32:, 3] = 0, 255
    options = {"auto-alt-ref": "0", "g": "40"}
    file = io.BytesIO(film([frame] * 80, "webm", codec, pix_fmt="yuva420p", codec_options=options))
    footage = probe(file)
    assert footage.num_frames == 80 and footage.seeks
    video = decode_clip(file, 2, 64, 64, start=3.0, fps=25.0, seeks=footage.seeks).float()
    assert video[..., :28].max() < 8 and video[..., 36:].min() > 192


@pytest.mark.parametrize("crop", ["crop_left=16", "crop_left=2:crop_right=6:crop_top=4:crop_bottom=10"])
def test_what_a_stream_crops_is_not_shown(crop: str, tmp_path: Path) -> None:
    file = tmp_path / "cropped.mp4"
    whole = Recipe("mp4", f"{X264} -bf 0").make(tmp_path)
    ffmpeg("-i", str(whole), "-c", "copy", "-frames:v", "3", "-bsf:v", f"h264_metadata={crop}", str(file))
    data = io.BytesIO(file.read_bytes())
    footage = probe(data)
    expected = decoded(file, footage.height, footage.width)
    video = decode_clip(data, 3, footage.height, footage.width, fps=25.0)
    assert np.abs(video.permute(1, 2, 3, 0).numpy().astype(int) - expected).mean() <= 1


def test_of_several_streams_the_command_lines_choice_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "two.mkv"
    sources = ["-f", "lavfi", "-i", "color=red:s=64x48:d=1", "-f", "lavfi", "-i", "color=blue:s=96x64:d=1"]
    for default, height in (("0", 48), ("1", 64)):
        which = ["-disposition:0", "0", "-disposition:1", "0", f"-disposition:{default}", "default"]
        ffmpeg(*sources, "-map", "0", "-map", "1", "-c:v", "mpeg4", *which, str(file))
        assert probe(io.BytesIO(file.read_bytes())).height == height
    ffmpeg(*sources, "-map", "0", "-map", "1", "-c:v", "mpeg2video", "-f", "mpegts", str(file))  # knows no default
    assert probe(io.BytesIO(file.read_bytes())).height == 64


def test_hdr_that_the_container_alone_states_is_refused(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain.mkv", tmp_path / "hdr.mkv"
    ffmpeg(
        "-f", "lavfi", "-i", "color=red:s=64x64:d=1", "-c:v", "libx265", "-x265-params", "log-level=none", str(plain)
    )
    ffmpeg("-i", str(plain), "-c", "copy", "-color_trc", "smpte2084", str(file))
    assert probe(io.BytesIO(plain.read_bytes())).num_frames == 25
    with pytest.raises(MediaError, match=r"HDR \(PQ\)"):
        probe(io.BytesIO(file.read_bytes()))


@pytest.mark.parametrize("offset", [0.0, 5000.0])
def test_joined_recordings_go_on_where_the_clock_is_set(offset: float, tmp_path: Path) -> None:
    codec = f"{X264} -g 50"
    parts = [Recipe("ts", codec, offset=at).make(tmp_path).read_bytes() for at in (0.0, offset)]
    file = tmp_path / "joined.ts"
    file.write_bytes(b"".join(parts))
    data = io.BytesIO(file.read_bytes())
    footage = probe(data)
    assert footage.num_frames == 2 * FRAMES and footage.fps == pytest.approx(RATE)
    expected = decoded(file, footage.height, footage.width)
    for number in (FRAMES - 1, FRAMES, FRAMES + 1, 2 * FRAMES - 1):
        cut = decode_clip(data, 1, footage.height, footage.width, number / RATE, seeks=footage.seeks)
        assert np.abs(cut[:, 0].permute(1, 2, 0).numpy().astype(int) - expected[number]).mean() <= 1, number


def test_more_pixels_than_memory_is_meant_to_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opaque, frame = [numbered(0)] * 2, np.full((48, 64, 4), 200, np.uint8)
    see_through = film([frame] * 2, "webm", "libvpx-vp9", pix_fmt="yuva420p", codec_options={"auto-alt-ref": "0"})
    photograph = io.BytesIO()
    _noise()[0].save(photograph, "PNG")  # whose header is read when it is decoded
    files = [film(opaque), see_through, photograph.getvalue()]
    for limit, is_read in ((48 * 64, True), (48 * 64 - 1, False)):
        monkeypatch.setattr("lightning_videoscale.data.shards.media._MAX_PIXELS", limit)
        for data in files:
            with nullcontext() if is_read else pytest.raises(MediaError, match=r"too many|does not decode"):
                probe(io.BytesIO(data))
