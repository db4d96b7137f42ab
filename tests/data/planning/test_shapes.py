"""From source metadata to post-transform shapes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.planning.shapes import (
    STANDARD_POLICY,
    Clips,
    ClipShape,
    Media,
    ShapePolicy,
    standard_mix,
)

WAN = GEOMETRIES["wan2.1"]


def clips(*rows: tuple[int, int, int, float], media: Media = Media.VIDEO) -> Clips:
    """Rows of width, height, frames and frames per second."""
    width, height, num_frames, fps = (np.array(column) for column in zip(*rows, strict=True))
    return Clips(
        width=width.astype(np.int32),
        height=height.astype(np.int32),
        num_frames=num_frames.astype(np.int32),
        fps=fps.astype(np.float64),
        duration=num_frames / np.maximum(fps, 1e-9) * (fps > 0),
        media=np.full(len(rows), media, np.uint8),
        caption_length=np.zeros(len(rows), np.int32),
        source=np.arange(len(rows), dtype=np.int32) % 2,
    )


def shapes_of(table: Clips, policy: ShapePolicy | None = None, geometry: ModelGeometry = WAN) -> list[ClipShape | None]:
    shaped = (policy or ShapePolicy()).shape(table, geometry)
    return [shaped.shapes[i] if i >= 0 else None for i in shaped.shape_id]


def test_a_clip_is_brought_to_its_tier_and_rate() -> None:
    full_hd = (1920, 1080, 300, 30.0)
    # sqrt(399 360 / 2 073 600) = 0.4388: 842.6 x 473.9 pixels; 160 frames at 16 per second, of which 81.
    assert shapes_of(clips(full_hd)) == [ClipShape(81, 464, 832)]
    assert shapes_of(clips(full_hd), ShapePolicy(areas=(720 * 1280,))) == [ClipShape(81, 720, 1280)]
    assert shapes_of(clips((1080, 1920, 90, 30.0))) == [ClipShape(45, 832, 464)]
    ltx, ti2v = GEOMETRIES["ltx-video"], GEOMETRIES["wan2.2-ti2v-5b"]
    assert shapes_of(clips((1080, 1920, 90, 30.0)), geometry=ltx) == [ClipShape(41, 832, 448)]
    assert shapes_of(clips(full_hd), ShapePolicy(areas=(704 * 1280,)), ti2v) == [ClipShape(81, 704, 1248)]


def test_nothing_is_upscaled_and_what_has_no_shape_is_told_apart() -> None:
    assert shapes_of(clips((320, 240, 20, 8.0))) == [ClipShape(17, 240, 320)]
    assert shapes_of(clips((320, 240, 1, 25.0), (320, 240, 0, 25.0), (4, 4, 20, 8.0), (320, 15, 20, 8.0))) == [
        ClipShape(1, 240, 320), None, None, None,
    ]  # fmt: skip


def test_images_and_latents() -> None:
    assert shapes_of(clips((640, 480, 1, 0.0), media=Media.IMAGE)) == [ClipShape(1, 480, 640)]
    assert shapes_of(clips((52, 30, 21, 0.0), media=Media.LATENTS)) == [ClipShape(21, 30, 52, latents=True)]
    assert WAN.sequence_length(21, 30, 52, latents=True) == WAN.sequence_length(81, 240, 416) == 21 * 15 * 26


def test_tokens_of_the_model_families() -> None:
    videos = {name: g for name, g in GEOMETRIES.items() if g.temporal_stride > 1}
    lengths = {name: g.sequence_length(81, 704, 1280) for name, g in videos.items()}
    assert lengths == {
        "wan2.1": 21 * 44 * 80,
        "wan2.2": 21 * 44 * 80,
        "wan2.1-vace": 21 * 44 * 80,
        "wan2.2-animate": 21 * 44 * 80,
        "chronoedit": 21 * 44 * 80,
        "skyreels-v2": 21 * 44 * 80,
        "wan2.2-ti2v-5b": 21 * 22 * 40,
        "hunyuanvideo": 21 * 44 * 80 + 256,
        "hunyuanvideo-1.5": 21 * 44 * 80 + 1000 + 256 + 729,
        "cogvideox": 21 * 44 * 80 + 226,
        "cogvideox-1.5": 11 * 44 * 80 + 226,
        "consisid": 21 * 44 * 80 + 226,
        "ltx-video": 11 * 22 * 40,
        "ltx-2": 11 * 22 * 40,
        "mochi": 14 * 44 * 80 + 256,
        "cosmos-1.0": 11 * 44 * 80,
        "cosmos-2": 21 * 44 * 80,
        "cosmos-2.5": 21 * 44 * 80,
        "kandinsky-5": 21 * 44 * 80,
        "easyanimate-v5.1": 21 * 44 * 80 + 256,
        "allegro": 21 * 44 * 80,
        "motif-video": 21 * 44 * 80 + 512,
        "anyflow": 21 * 44 * 80,
        "qwen-image": 21 * 44 * 80 + 512,  # whose VAE is Wan's
    }
    images = {name: g.sequence_length(1, 1024, 1024) for name, g in GEOMETRIES.items() if name not in videos}
    assert images == {
        "flux": 64 * 64 + 512,
        "flux2": 64 * 64 + 512,
        "sd3": 64 * 64 + 333,
        "chroma": 64 * 64 + 512,
        "z-image": 64 * 64 + 512,
        "cogview4": 64 * 64 + 1024,
        "pixart": 64 * 64,
    }
    with pytest.raises(ValueError, match=r"\(5, 8, 7\) .*\(1, 2, 2\)"):
        WAN.sequence_length(np.array([5, 5]), np.array([8, 8]), np.array([8, 7]), latents=True)


sizes = st.tuples(st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 400), st.floats(0.1, 240))


@given(st.lists(sizes, min_size=1, max_size=30), st.integers(0, 2**40), st.sampled_from(sorted(GEOMETRIES)))
def test_every_shape_fits_model_tier_and_source(rows: list[tuple[int, int, int, float]], seed: int, name: str) -> None:
    table, geometry = clips(*rows), GEOMETRIES[name]
    policy = replace(STANDARD_POLICY, max_frames=49)
    shaped = policy.shape(table, geometry, seed)
    assert list(shaped.shapes) == sorted(set(shaped.shapes))
    for (width, height, num_frames, fps), shape_id, start in zip(rows, shaped.shape_id, shaped.start, strict=True):
        if shape_id < 0:
            assert num_frames == 0 or min(width, height) < geometry.side_multiple * 16
            continue
        shape = shaped.shapes[shape_id]
        assert shape.frames <= min(num_frames, 49) and (shape.frames - 1) % geometry.temporal_stride == 0
        assert shape.height <= height and shape.width <= width and shape.height * shape.width <= 720 * 1280
        assert shape.height % geometry.side_multiple == shape.width % geometry.side_multiple == 0
        assert geometry.sequence_length(shape.frames, shape.height, shape.width) > 0
        # What is read ends within the clip.
        assert start >= 0 and start + shape.frames / min(16.0, fps) <= num_frames / fps + 1 / min(16.0, fps)


def test_the_standard_mix_has_the_shares_that_define_it() -> None:
    table = clips((1920, 1080, 300, 30.0), (960, 540, 300, 30.0))
    mix = standard_mix(table, 40_000)
    assert np.mean(mix.width == 1920) == pytest.approx(0.5, abs=0.01)
    shaped = STANDARD_POLICY.shape(mix, WAN)
    shape = np.array(shaped.shapes)[shaped.shape_id]
    assert np.mean(shape[:, 0] == 1) == pytest.approx(0.3, abs=0.01)
    assert np.mean((shape[:, 0] > 1) & (shape[:, 0] < 81)) == pytest.approx(0.35 * 64 / 65, abs=0.01)
    tiers = [np.mean(shape[mix.width == 1920, 2] == width) for width in (336, 832, 1280)]
    assert tiers == pytest.approx([0.3, 0.4, 0.3], abs=0.012)


def test_draws_are_seeded_and_every_epoch_draws_anew() -> None:
    mix = standard_mix(clips((1920, 1080, 300, 30.0)), 1000, seed=3)
    first, again = (STANDARD_POLICY.shape(mix, WAN, seed=5) for _ in range(2))
    assert (first.shape_id == again.shape_id).all() and (first.start == again.start).all()
    other = STANDARD_POLICY.shape(mix, WAN, seed=5, epoch=1)
    assert (np.array(first.shapes)[first.shape_id] != np.array(other.shapes)[other.shape_id]).any()


def test_whether_a_clip_is_trained_on_does_not_depend_on_the_draw() -> None:
    table = clips((4000, 17, 100, 30.0), (30, 2000, 100, 30.0), (15, 2000, 100, 30.0), (640, 360, 9, 30.0))
    for epoch in range(20):
        shaped = STANDARD_POLICY.shape(table, WAN, epoch=epoch)
        assert (shaped.shape_id >= 0).tolist() == [True, True, False, True]
        assert min(shaped.shapes[shaped.shape_id[0]][1:3]) == 16


def test_a_million_clips_take_a_moment() -> None:
    mix = standard_mix(clips((1920, 1080, 300, 30.0), (960, 540, 40, 30.0)), 1_000_000)
    started = time.perf_counter()
    STANDARD_POLICY.shape(mix, WAN)
    assert time.perf_counter() - started < 10


def test_a_table_is_read_and_a_bad_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "clips.csv"
    file.write_text("source,clip,width,height,fps,num_frames\na,1,960,540,29.97,240\nb,2,320,240,25,100\n")
    table = Clips.from_csv(file)
    assert table.width.tolist() == [960, 320] and table.source.tolist() == [0, 1]
    assert table.duration.tolist() == pytest.approx([240 / 29.97, 4.0])
    for text, message in [
        ("source,width\na,1\n", r"\['height', 'fps', 'num_frames'\]"),
        ("source,width,height,fps,num_frames\n", "has no rows"),
        ("source,width,height,fps,num_frames\na,1,2,x,3\n", "are no numbers"),
        ("source,width,height,fps,num_frames\na,1,2,3,4\na,1,2,0,3\n", "row 2 "),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            Clips.from_csv(file)


def test_a_policy_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="weight per area"):
        ShapePolicy(areas=(100, 200), weights=(1.0,))
    with pytest.raises(ValueError, match="Shares lie in"):
        ShapePolicy(crop_share=1.5)
    with pytest.raises(ValueError, match="crop_min_frames <= max_frames, got 17 and 9"):
        ShapePolicy(max_frames=9, crop_share=0.5)
    for weight in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"weight per area.* {weight}"):
            ShapePolicy(areas=(100, 200), weights=(1.0, weight))
    with pytest.raises(ValueError, match=r"weight per area.* nan"):
        ShapePolicy(areas=(100, math.nan))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="crop_min_frames <= max_frames, got 17 and inf"):
        ShapePolicy(max_frames=math.inf, crop_share=0.5)  # type: ignore[arg-type]
    for nonsense in (
        {"max_frames": 0},
        {"max_frames": math.nan},
        {"crop_min_frames": 0},
        {"fps": 0.0},
        {"fps": math.inf},
    ):
        with pytest.raises(ValueError, match="ShapePolicy needs"):
            ShapePolicy(**nonsense)


def test_short_clips_need_no_word_about_crops() -> None:
    assert shapes_of(clips((320, 240, 40, 16.0)), ShapePolicy(max_frames=9)) == [ClipShape(9, 240, 320)]
