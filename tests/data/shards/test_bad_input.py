"""Everything that real collections of videos hold: it is read as it is meant, or listed with the reason."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import resource
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save as save_safetensors

from lightning_videoscale.data import ShardIndex
from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards.film import MediaError
from lightning_videoscale.data.shards.frames import decode_clip
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.probing import probe
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from tests.data.clips import clip, write_shard
from tests.data.films import film, numbered, numbers


def _frames(count: int, height: int = 48, width: int = 64) -> list[np.ndarray[Any, Any]]:
    return [numbered(i % 50, height, width) for i in range(count)]


def _noise(count: int = 40) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(count)]


def _index(folder: Path, content: bytes, extension: str = "mp4", **members: bytes) -> ShardIndex:
    """The index of a shard with this sample, after a good one."""
    sample = {"__key__": "odd", extension: content, "txt": b"odd"} | members
    return index_shards([str(write_shard(folder / "000.tar", [clip(0), sample]))])


def _cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


def _sound_only(picture: bool = False) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=44100)
        cover = output.add_stream("mjpeg", rate=1) if picture else None
        if cover is not None:
            cover.height, cover.width, cover.pix_fmt = 48, 64, "yuvj420p"
            cover.disposition = av.stream.Disposition.attached_pic
        for i in range(20):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 44100, i * 1024
            output.mux(sound.encode(silence))
        if cover is not None:
            output.mux(cover.encode(av.VideoFrame.from_ndarray(numbered(3), format="rgb24")))
            output.mux(cover.encode())
        output.mux(sound.encode())
    return file.getvalue()


def _no_frames(container: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        output.start_encoding()
    return file.getvalue()


def _with_a_hole() -> bytes:
    data = bytearray(film(_noise()))
    data[len(data) // 3 : len(data) // 3 + 3000] = bytes(3000)
    return bytes(data)


def _bomb() -> bytes:
    """A PNG of a few bytes that claims 60 000 x 60 000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    packed = (struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut, index last": (lambda: _cut(film(_noise()), 0.6), "does not decode"),
    "cut, index first": (lambda: _cut(film(_noise(), movflags="faststart"), 0.6), "does not decode"),
    "cut, hevc": (lambda: _cut(film(_frames(60), codec="libx265", movflags="faststart"), 0.9), "ends early|not decode"),
    "cut, fragments": (lambda: _cut(film(_noise(), movflags="frag_keyframe+empty_moov"), 0.9), "does not decode"),
    "cut, matroska": (lambda: _cut(film(_noise(), "matroska"), 0.6), r"header says 1\.60 s and its content ends at 0"),
    "cut, webm": (lambda: _cut(film(_noise(), "webm", "libvpx"), 0.95), "ends early: its header says"),
    "cut, avi": (lambda: _cut(film(_noise(), "avi", "mpeg4"), 0.6), "is damaged|ends early"),
    "a hole in the middle": (_with_a_hole, "does not decode|is damaged"),
    "no bytes": (bytes, "it is empty"),
    "no frames, mp4": (lambda: _no_frames("mp4", "libx264"), r"no video stream \(streams: none\)"),
    "no frames, webm": (lambda: _no_frames("webm", "libvpx"), "no frame could be decoded|does not decode"),
    "sound only": (_sound_only, r"no video stream \(streams: audio\)"),
    "sound with a cover": (lambda: _sound_only(picture=True), r"no video stream \(streams: audio, video\)"),
    "text": (lambda: b"<html>404 not found</html>" * 50, "does not decode"),
    "noise": (lambda: np.random.default_rng(0).bytes(5000), "does not decode"),
    "an unknown codec": (lambda: film(_frames(5)).replace(b"avc1", b"zzzz"), "codec that FFmpeg does not know"),
    "a picture larger than memory": (_bomb, "does not decode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_listed_with_the_reason(tmp_path: Path, case: str) -> None:
    content, reason = REFUSED[case]
    index = _index(tmp_path, content())
    assert index.samples.keys == ("clip00000",), "the good sample beside it stays"
    [(shard, refusal)] = index.refused
    assert (shard, refusal.member) == ("000.tar", "odd.mp4")
    assert re.search(reason, refusal.reason)


@pytest.mark.parametrize(
    ("data", "frames", "size"),
    [
        (lambda: film(_frames(30), "matroska", live="1"), 30, (48, 64)),  # states no duration
        (lambda: film(_frames(30), movflags="frag_keyframe+empty_moov"), 30, (48, 64)),  # nor does this
        (lambda: film(_frames(30), codec="libx265", pix_fmt="yuv420p10le"), 30, (48, 64)),
        (lambda: film(_frames(30), "matroska", "ffv1", pix_fmt="yuva420p"), 30, (48, 64)),
        (lambda: film(_frames(30), "webm", "libvpx-vp9", pix_fmt="yuva420p"), 30, (48, 64)),
        (lambda: film(_frames(30), pix_fmt="yuv444p"), 30, (48, 64)),
        (lambda: film(_frames(30), "mov", rotation=90), 30, (64, 48)),
        (lambda: film(_frames(30, 4, 4)), 30, (4, 4)),
        (lambda: film(_frames(30, 34, 50)), 30, (34, 50)),
        (lambda: film(_frames(1)), 1, (48, 64)),
        (lambda: film(_frames(30), "webm", "libvpx-vp9"), 30, (48, 64)),  # under the name .mp4
        (lambda: film(_frames(30), "avi", "mpeg4"), 30, (48, 64)),  # likewise
    ],
    ids=["no duration", "fragments", "10 bit", "alpha", "alpha, vp9", "4:4:4", "rotated", "4x4", "odd sides",
         "one frame", "webm as mp4", "avi as mp4"],
)  # fmt: skip
def test_what_is_unusual_is_read_as_it_is_meant(
    tmp_path: Path, data: Callable[[], bytes], frames: int, size: tuple[int, int]
) -> None:
    index = _index(tmp_path, data())
    assert index.refused == ()
    sample = index.samples[1]
    assert (sample.num_frames, sample.height, sample.width) == (frames, *size)
    assert sample.fps == pytest.approx(25) and sample.duration == pytest.approx(frames / 25)
    video = SampleReader(index).read(1, Cut(ClipShape(frames, *size), fps=25.0))["video"]
    assert video.shape == (3, frames, *size)
    if size != (4, 4):
        assert numbers(video) == list(range(frames))


def test_what_a_file_is_its_content_says(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(numbered(3)).save(picture, "PNG")
    index = _index(tmp_path, picture.getvalue(), "mp4")
    assert Media(index.samples.clips.media[1]) == Media.IMAGE
    assert numbers(SampleReader(index).read(1, Cut(ClipShape(1, 32, 32)))["video"]) == [3]
    assert Media(_index(tmp_path, film(_frames(5)), "jpg").samples.clips.media[1]) == Media.VIDEO


@pytest.mark.parametrize("kind", ["concat", "playlist"])
@pytest.mark.parametrize("name", ["secret.mp4", "/{folder}/secret.mp4", "file:/{folder}/secret.mp4"])
def test_a_file_that_names_other_files_opens_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    (tmp_path / "secret.mp4").write_bytes(film(_frames(5)))
    monkeypatch.chdir(tmp_path)
    target = name.format(folder=str(tmp_path).lstrip("/"))
    hostile = {
        "concat": f"ffconcat version 1.0\nfile '{target}'\n",
        "playlist": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{target}\n#EXT-X-ENDLIST\n",
    }[kind].encode()
    if kind == "concat" and name == "secret.mp4":
        with av.open(io.BytesIO(hostile)) as container:
            assert sum(1 for _ in container.decode(video=0)) == 5, "without care, FFmpeg opens the other file"
    index = _index(tmp_path, hostile)
    assert len(index) == 1 and "does not decode" in index.refused[0][1].reason


def test_three_hours_take_little_memory_and_any_minute_is_at_hand(tmp_path: Path) -> None:
    times = [10.0 * i for i in range(1080)]
    index = _index(tmp_path, film(_frames(1080, 16, 16), "matroska", times=times, codec_options={"g": "30"}))
    sample = index.samples[1]
    assert sample.num_frames == 1080 and sample.duration == pytest.approx(10_800, abs=11)
    video = SampleReader(index).read(1, Cut(ClipShape(3, 16, 16), start=7210.0, fps=0.1))["video"]
    assert numbers(video) == [721 % 50, 722 % 50, 723 % 50]

    long = film([numbered(i % 50, 360, 640) for i in range(600)], codec_options={"preset": "ultrafast"})
    index = _index(tmp_path, long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    SampleReader(index).read(1, Cut(ClipShape(9, 64, 64), start=20.0, fps=16.0))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100, f"{grown:.0f} MiB, and all frames together are {600 * 360 * 640 * 3 / 2**20:.0f}"


def test_names_of_all_languages_and_none_that_leaves_the_tar(tmp_path: Path) -> None:
    samples = [
        {"__key__": key, "mp4": film(_frames(3))} for key in ("日本/クリップ 1", "../../outside", "/outside", "é")
    ]
    folder = tmp_path / "inner" / "shards"
    index = index_shards([str(write_shard(folder / "000.tar", samples))])
    assert index.samples.keys == ("日本/クリップ 1", "é")
    assert [refusal.member for _, refusal in index.refused] == ["../../outside.mp4", "/outside.mp4"]
    assert index.sample_id(0) == "000.tar/日本/クリップ 1"
    assert SampleReader(index).read(0, Cut(ClipShape(3, 16, 16), fps=25.0))["video"].shape == (3, 3, 16, 16)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["000.tar", "inner", "shards"]


def test_one_key_twice_is_refused_whatever_lies_between(tmp_path: Path) -> None:
    video = film(_frames(3))
    samples = [{"__key__": key, "mp4": video, "txt": b"x"} for key in ("a", "b", "a")]
    index = index_shards([str(write_shard(tmp_path / "000.tar", samples))])
    assert index.samples.keys == ("b",)
    assert {refusal.member.split(".")[0] for _, refusal in index.refused} == {"a"}


def test_two_videos_in_one_sample_are_not_guessed_between(tmp_path: Path) -> None:
    index = _index(tmp_path, film(_frames(3)), "mp4", webm=film(_frames(3), "webm", "libvpx"))
    assert "it may hold one of them" in index.refused[0][1].reason
    named = _index(tmp_path, film(_frames(3)), "v2.mp4")
    assert next(iter(named.samples[1].members)) == "v2.mp4"


SOUND = {
    "mp4": lambda: film(_frames(12)),
    "matroska": lambda: film(_frames(12), "matroska"),
    "webm": lambda: film(_frames(12), "webm", "libvpx"),
    "avi": lambda: film(_frames(12), "avi", "mpeg4"),
    "png": lambda: _picture("PNG"),
    "jpeg": lambda: _picture("JPEG"),
}


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(numbered(3)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", SOUND)
@settings(max_examples=40)
@given(data=st.data())
def test_damage_anywhere_is_an_answer_and_nothing_else(kind: str, data: st.DataObject) -> None:
    content = bytearray(_sound(kind))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = io.BytesIO(bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))]))
    with contextlib.suppress(MediaError):
        footage = probe(file)
        assert footage.num_frames >= 1 and footage.height >= 1 and footage.width >= 1
    with contextlib.suppress(MediaError):
        assert decode_clip(file, 1, 16, 32).shape == (3, 1, 16, 32)


@functools.cache
def _sound(kind: str) -> bytes:
    return SOUND[kind]()


@pytest.mark.parametrize(
    ("members", "refused", "says"),
    [
        (("latents.npy", "latents.safetensors"), "latents.safetensors", "rename one"),
        (("latents.npy", "depth.npy", "depth.json"), "depth", "rename one"),
        (("png", "video.npy"), "video.npy", "rename one"),
        (("png", "latents.png"), "latents.png", "uses the name 'latents' itself; rename it"),
        (("png", "latents.json"), "latents.json", "uses the name 'latents' itself; rename it"),
        (("latents.npy", "video.npy"), "video.npy", "uses the name 'video' itself; rename it"),
    ],
)
def test_members_that_would_take_the_place_of_others_are_refused(
    tmp_path: Path, members: tuple[str, ...], refused: str, says: str
) -> None:
    """One would take the other's place, without a word."""
    shard = tmp_path / "0.tar"
    with tarfile.open(shard, "w") as tar:
        for extension in members:
            data = content_of(extension)
            entry = tarfile.TarInfo(f"clip.{extension}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    [(_, refusal)] = index_shards([str(shard)]).refused
    assert refused in refusal.member and says in refusal.reason


def content_of(extension: str) -> bytes:
    if extension == "json":
        return b"{}"
    if extension.endswith("npy"):
        file = io.BytesIO()
        np.save(file, np.ones((4, 1, 4, 4), np.float32))
        return file.getvalue()
    if extension.endswith("safetensors"):
        return save_safetensors({"latents": torch.ones(4, 1, 4, 4)})
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "png")
    return picture.getvalue()
