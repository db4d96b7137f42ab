"""Decoding to the planned shape: the right frames, upright, in the right size and colours."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.frames import decode_clip, decode_image
from lightning_videoscale.data.shards.probing import probe
from tests.data.command_line import Recipe
from tests.data.films import film, numbered, numbers
from tests.examples.footage import moving_square


def _decode(data: bytes, *args: Any, **kwargs: Any) -> torch.Tensor:
    return decode_clip(io.BytesIO(data), *args, **kwargs)


@pytest.fixture(scope="module")
def clip50() -> bytes:
    """50 numbered frames at 25 fps, a key frame every 12."""
    return film([numbered(i) for i in range(50)], codec_options={"g": "12", "keyint_min": "12", "sc_threshold": "0"})


@pytest.mark.parametrize(
    ("num_frames", "start", "fps", "expected"),
    [
        (5, 0.0, 25.0, [0, 1, 2, 3, 4]),
        (5, 0.0, 12.5, [0, 2, 4, 6, 8]),
        (4, 1.0, 5.0, [25, 30, 35, 40]),
        (5, 0.5, 10.0, [12, 15, 17, 20, 22]),
        (4, 0.0, 50.0, [0, 0, 1, 1]),
        (1, 1.96, 0.0, [49]),
        (1, 1.999, 25.0, [49]),
        (50, 0.0, 25.0, list(range(50))),
        (3, 37 / 25, 25.0, [37, 38, 39]),
    ],
)
def test_a_frame_is_what_is_on_display_at_its_moment(
    clip50: bytes, num_frames: int, start: float, fps: float, expected: list[int]
) -> None:
    video = _decode(clip50, num_frames, 48, 64, start=start, fps=fps)
    assert video.shape == (3, num_frames, 48, 64) and video.dtype == torch.uint8
    assert numbers(video) == expected


@settings(max_examples=30)
@given(first=st.integers(0, 49), count=st.integers(1, 50), fps=st.sampled_from([25.0, 12.5, 8.0, 3.0]))
def test_seeking_finds_the_same_frames_as_reading_from_the_start(
    clip50: bytes, first: int, count: int, fps: float
) -> None:
    count = min(count, int((49 - first) / 25 * fps) + 1)
    moments = first / 25 + np.arange(count) / fps
    expected = [int(moment * 25 + 0.25) for moment in moments]
    assert numbers(_decode(clip50, count, 16, 16, start=first / 25, fps=fps)) == expected


@pytest.mark.parametrize(("container", "codec"), [("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")])
def test_containers_with_rounded_times_or_without_an_index(container: str, codec: str) -> None:
    ntsc = film([numbered(i) for i in range(48)], container, codec, rate=24, codec_options={"g": "8"})
    assert numbers(_decode(ntsc, 24, 48, 64, start=0.0, fps=12.0)) == list(range(0, 48, 2))
    assert numbers(_decode(ntsc, 8, 48, 64, start=30 / 24, fps=24.0)) == list(range(30, 38))


def test_a_variable_rate_keeps_its_pace() -> None:
    """Ten frames in the first half second, then one every half second."""
    times = [i * 0.05 for i in range(10)] + [0.5 + 0.5 * i for i in range(4)]
    data = film([numbered(i) for i in range(14)], "matroska", times=times)
    footage = probe(io.BytesIO(data))
    assert footage.num_frames == 14 and footage.duration == pytest.approx(2.0, abs=0.51)
    assert numbers(_decode(data, 4, 48, 64, start=0.0, fps=2.0)) == [0, 10, 11, 12]
    assert numbers(_decode(data, 5, 48, 64, start=0.2, fps=10.0)) == [4, 6, 8, 10, 10]


def test_more_than_there_is_is_an_error(clip50: bytes) -> None:
    with pytest.raises(MediaError, match=r"ends at"):
        _decode(clip50, 53, 48, 64, start=0.0, fps=25.0)
    with pytest.raises(MediaError, match="ends at"):
        _decode(clip50, 1, 48, 64, start=7.0)


def test_pictures_are_scaled_to_cover_and_cropped_around_the_centre() -> None:
    frame = np.zeros((64, 128, 3), np.uint8)
    frame[:, 32:96] = 255  # the square in the middle
    data = film([frame] * 2, codec_options={"crf": "1"})
    square = _decode(data, 1, 32, 32)
    assert square.float().mean() > 250
    wide = _decode(data, 1, 16, 64)[:, 0].float().mean(dim=(0, 1))
    assert wide[:14].max() < 5 and wide[18:46].min() > 250 and wide[50:].max() < 5


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_frames_come_upright(rotation: int) -> None:
    frames = moving_square(6, 48, 80)
    upright = np.rot90(frames[3], k=rotation // 90)
    data = film(frames, "mov", rotation=rotation)
    footage = probe(io.BytesIO(data))
    assert (footage.height, footage.width) == upright.shape[:2]
    video = _decode(data, 6, *upright.shape[:2], fps=25.0)
    assert np.abs(video[:, 3].permute(1, 2, 0).numpy().astype(int) - upright).mean() < 6


def test_ten_bits_and_their_colours() -> None:
    frames = moving_square(3, 48, 80)
    data = film(frames, "matroska", "ffv1", pix_fmt="yuv444p10le")
    video = _decode(data, 3, 48, 80, fps=25.0)
    assert np.abs(video.permute(1, 2, 3, 0).numpy().astype(int) - np.stack(frames)).max() <= 3


def test_what_is_transparent_is_black() -> None:
    frame = np.full((32, 32, 4), 200, np.uint8)
    frame[:, :16, 3], frame[:, 16:, 3] = 0, 255
    for data in (film([frame] * 2, "mov", "qtrle", pix_fmt="argb"), _png(frame)):
        video = _decode(data, 1, 32, 32).float()
        assert video[..., :16].max() == 0 and video[..., 16:].min() > 195


def test_colours_of_a_palette_may_be_transparent() -> None:
    image, file = Image.new("P", (2, 1)), io.BytesIO()
    image.putpalette([200, 100, 50, 60, 80, 100])
    image.putpixel((1, 0), 1)
    image.save(file, "PNG", transparency=bytes([0, 128]))
    assert decode_image(file)[:, 0].T.tolist() == [[0, 0, 0], [30, 40, 50]]


def _png(frame: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "jpeg", "zstd"])
def test_tiff_is_read_whole_or_refused(compression: str) -> None:
    frame, file = moving_square(1, 48, 80)[0], io.BytesIO()
    Image.fromarray(frame).save(file, "TIFF", compression=compression, dpi=(300, 300))
    assert np.abs(decode_image(file).permute(1, 2, 0).numpy().astype(int) - frame).mean() < 4
    with pytest.raises(MediaError, match="does not decode"):
        probe(io.BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "I;16", "RGB"])
def test_photographs_of_all_modes(mode: str) -> None:
    grey = Image.fromarray(np.linspace(0, 255, 40 * 60).reshape(40, 60).astype(np.uint8))
    file = io.BytesIO()
    if mode == "I;16":
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(file, "PNG")
    else:
        grey.convert(mode).save(file, "JPEG" if mode == "CMYK" else "PNG")
    picture = decode_image(file)
    assert picture.shape == (3, 40, 60)
    assert np.abs(picture[0].numpy().astype(int) - np.asarray(grey)).mean() < (8 if mode == "CMYK" else 2)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_photographs_follow_their_exif_orientation(file_format: str) -> None:
    frame = Image.fromarray(moving_square(1, 48, 80)[0])
    for orientation in range(1, 9):
        exif, file = Image.Exif(), io.BytesIO()
        exif[ExifTags.Base.Orientation] = orientation
        frame.save(file, file_format, exif=exif, quality=95)
        upright = np.asarray(ImageOps.exif_transpose(Image.open(file)))
        picture = decode_image(file)
        assert picture.shape == (3, *upright.shape[:2]), orientation
        assert np.abs(picture.permute(1, 2, 0).numpy().astype(int) - upright).mean() < 2, orientation
        footage = probe(file)
        assert footage.is_image and (footage.height, footage.width) == upright.shape[:2]


def test_a_photograph_is_not_stretched_by_its_resolution() -> None:
    file = io.BytesIO()
    Image.fromarray(numbered(3)).save(file, "JPEG", dpi=(300, 100))
    assert decode_image(file).shape == (3, 48, 64)


@pytest.mark.parametrize("file_format", ["WEBP", "GIF", "AVIF"])
def test_animations_are_videos_and_their_single_frames_photographs(file_format: str) -> None:
    frames = [Image.fromarray(numbered(i)) for i in range(6)]
    moving, still = io.BytesIO(), io.BytesIO()
    frames[0].save(
        moving, file_format, save_all=True, append_images=frames[1:], duration=[100, 100, 300, 100, 100, 100]
    )
    frames[4].save(still, file_format)
    footage = probe(moving)
    assert not footage.is_image and footage.num_frames == 6 and footage.duration == pytest.approx(0.8)
    assert numbers(decode_clip(moving, 8, 48, 64, fps=10.0)) == [0, 1, 2, 2, 2, 3, 4, 5]
    assert probe(still).is_image and numbers(decode_image(still)[:, None]) == [4]


def test_pictures_that_would_be_wrong_are_refused() -> None:
    file = io.BytesIO()
    Image.fromarray(np.ones((48, 64), np.float32)).save(file, "TIFF")
    with pytest.raises(MediaError, match="no colours of their own"):
        decode_image(file)
    see_through = np.full((48, 64, 4), 200, np.uint8)
    see_through[:, :32, 3] = 0
    file = io.BytesIO()
    Image.fromarray(see_through).save(file, "AVIF")
    with pytest.raises(MediaError, match="AVIF with transparency"):
        probe(file)


def test_a_recording_that_begins_within_a_group_of_pictures_is_shown_from_the_next_one_on() -> None:
    data = film([numbered(i) for i in range(50)], "mpegts", codec_options={"g": "12", "sc_threshold": "0"})
    late = data[10 * 188 :]
    assert numbers(_decode(late, 38, 48, 64, fps=25.0)) == list(range(12, 50))
    assert probe(io.BytesIO(late)).num_frames == 38


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_cut_animation_is_an_error(kept: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (6, 48, 64, 3), np.uint8)
    frames, file = [Image.fromarray(frame) for frame in noise], io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    with pytest.raises(MediaError, match="does not decode"):
        probe(io.BytesIO(file.getvalue()[: int(kept * len(file.getvalue()))]))


@pytest.mark.parametrize(("curve", "name"), [("smpte2084", "PQ"), ("arib-std-b67", "HLG")])
def test_hdr_is_refused(tmp_path: Path, curve: str, name: str) -> None:
    hdr = Recipe("mkv", "ffv1", pix_fmt="yuv420p10le", filters=f"setparams=color_trc={curve}")
    file = io.BytesIO(hdr.make(tmp_path).read_bytes())
    for look in (probe, decode_image):
        with pytest.raises(MediaError, match=rf"HDR \({name}\).*tone"):
            look(file)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Recipe("mp4", "mpeg4", turn="-display_rotation 30"), "by no quarter of a circle"),
        (Recipe("mov", "mjpeg", filters="setsar=50", pix_fmt="yuvj420p"), "50 times as wide as they are high"),
    ],
)
def test_films_that_are_askew_or_stretched_beyond_measure_are_refused(
    tmp_path: Path, recipe: Recipe, reason: str
) -> None:
    with pytest.raises(MediaError, match=reason):
        probe(io.BytesIO(recipe.make(tmp_path).read_bytes()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "real_clip" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--videos")
        clips = sorted(Path(folder).glob("*.*")) if folder else []
        metafunc.parametrize("real_clip", clips, ids=lambda clip: clip.stem)


def test_real_clips(real_clip: Path) -> None:
    """Every eighth of second from 0.3 s on, against frames that are picked from the whole list by hand."""
    with av.open(str(real_clip)) as container:
        frames = list(container.decode(video=0))
        stretched = int(frames[0].width * (container.streams.video[0].sample_aspect_ratio or 1))
    footage = probe(io.BytesIO(real_clip.read_bytes()))
    assert (footage.num_frames, footage.height, footage.width) == (len(frames), frames[0].height, stretched)
    height, width = footage.height // 16 * 16, footage.width // 16 * 16
    video = _decode(real_clip.read_bytes(), 5, height, width, start=0.3, fps=8.0)
    top, left = (footage.height - height) // 2, (footage.width - width) // 2
    for k in range(5):
        due = [frame for frame in frames if frame.time <= 0.3 + k / 8 + 0.25 / footage.fps]
        expected = due[-1].to_ndarray(format="rgb24", width=stretched)[top : top + height, left : left + width]
        difference = np.abs(video[:, k].permute(1, 2, 0).numpy().astype(int) - expected)
        assert difference.mean() < 3, k  # scaled to cover: a side may be stretched by a few columns
