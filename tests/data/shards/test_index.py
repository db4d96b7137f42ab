"""The table of all samples: what is in it, when it is read again, and which samples are refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from lightning_videoscale.data import ShardError, ShardIndex
from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards import indexing
from lightning_videoscale.data.shards.index import default_index_file
from lightning_videoscale.data.shards.indexing import build_index, index_shards, known_shards
from lightning_videoscale.data.shards.keys import split_dotted
from lightning_videoscale.data.shards.location import ByteRange
from lightning_videoscale.data.shards.safetensors import read_tensors
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from lightning_videoscale.data.shards.shard_entry import header_line, shard_line
from lightning_videoscale.data.shards.storage import open_shard
from tests.data.clips import SHAPES, clip, expand_shards, npy, write_shard, write_shards
from tests.data.films import film, numbered, numbers, picture
from tests.data.shards.test_decoding import Bomb


def _index(folder: Path, samples: int = 12) -> tuple[list[str], ShardIndex]:
    paths = expand_shards(write_shards(folder, samples))
    return paths, index_shards(paths)


def _refused(*samples: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Members that are refused of a shard that holds one good sample and these."""
    index = index_shards([str(write_shard(folder / "000.tar", [clip(1), *samples]))])
    assert index.samples.keys == ("clip00001",)
    return [refusal for _, refusal in index.refused]


def test_samples_are_numbered_in_the_order_of_the_shards(tmp_path: Path) -> None:
    _, index = _index(tmp_path)
    assert len(index) == 12
    assert [index.sample_id(i) for i in (0, 1, 5, 6, 11)] == [
        "000.tar/clip00000", "000.tar/clip00002", "000.tar/clip00010", "001.tar/clip00001", "001.tar/clip00011",
    ]  # fmt: skip
    assert {sample.shape for sample in index.samples} <= set(SHAPES)
    assert list(index.samples[0].members) == ["latents.npy", "json", "txt"], "what it is made of comes first"
    assert index.shard_numbers.tolist() == [0] * 6 + [1] * 6


def test_columns_and_rows_say_the_same(tmp_path: Path) -> None:
    _, index = _index(tmp_path)
    clips = index.samples.clips
    assert (clips.media == Media.LATENTS).all() and not clips.duration.any()
    assert clips.caption_length.tolist() == [len(f"a caption, n° {int(key[4:])}") for key in index.samples.keys]
    for i, sample in enumerate(index.samples):
        assert sample.shape == (index.samples.channels[i], clips.num_frames[i], clips.height[i], clips.width[i])
        data = Path(index.shard_of(i).url).read_bytes()
        at = sample.members["txt"]
        assert data[at.offset : at.offset + at.size].decode() == f"a caption, n° {int(sample.key[4:])}"


def test_a_saved_index_is_the_same_index_also_after_a_move(tmp_path: Path) -> None:
    paths, index = _index(tmp_path / "here")
    file = default_index_file(paths)
    index.save(file)
    assert ShardIndex.load(file).digest == index.digest
    assert list(ShardIndex.load(file).samples) == list(index.samples)
    assert file.parent == Path(paths[0]).parent and file.name.startswith("videoscale-index-")
    assert os.listdir(file.parent).count(file.name) == 1 and len(os.listdir(file.parent)) == 3

    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = ShardIndex.load(tmp_path / "there" / file.name)
    assert moved.digest == index.digest
    assert [shard.url for shard in moved.shards] == [str(tmp_path / "there" / f"{i:03}.tar") for i in range(2)]
    assert all(open_shard(shard.url).stat() == (shard.size, shard.stamp) for shard in moved.shards)


def test_digest_sees_what_a_plan_reads_and_nothing_else(tmp_path: Path) -> None:
    _, index = _index(tmp_path / "a")
    paths, same = _index(tmp_path / "b")
    os.utime(paths[0], (0, 0))
    assert index.digest == same.digest == index_shards(paths).digest
    assert index.digest != index_shards(paths[::-1]).digest
    write_shard(Path(paths[0]), [clip(99)])
    assert index.digest != index_shards(paths).digest


def test_only_changed_shards_are_looked_at_again(tmp_path: Path) -> None:
    paths, index = _index(tmp_path)
    assert index_shards(paths, index.shards).shards == index.shards

    write_shard(Path(paths[1]), [clip(99)])
    changed = index_shards(paths, index.shards)
    assert [entry is known for entry, known in zip(changed.shards, index.shards, strict=True)] == [True, False]
    assert changed.sample_id(6) == "001.tar/clip00099"
    assert len(index_shards([paths[0], str(write_shard(tmp_path / "new.tar", [clip(7)]))], index.shards)) == 7


def test_a_build_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = expand_shards(write_shards(tmp_path, 12, shards=4))
    file, looked, describe = default_index_file(paths), set(), indexing.describe

    def until_the_third(shard: Any, *about: Any) -> Any:
        if shard.url == paths[2]:
            raise KeyboardInterrupt
        return describe(shard, *about)

    def noting(shard: Any, *about: Any) -> Any:
        looked.add(shard.url)
        return describe(shard, *about)

    monkeypatch.setattr(indexing, "describe", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        build_index(paths, file)
    assert not file.exists()
    [left] = tmp_path.glob("*.unfinished")
    left.write_bytes(left.read_bytes() + left.read_bytes()[-200:-50])  # a line that was being written
    assert [entry.url for entry in known_shards(file)] == paths[:2]

    monkeypatch.setattr(indexing, "describe", noting)
    index = build_index(paths, file, workers=2)
    assert looked == set(paths[2:])
    assert index.digest == index_shards(paths).digest == ShardIndex.load(file).digest
    assert not list(tmp_path.glob("*.unfinished"))


def test_any_number_of_workers_builds_the_same_index(tmp_path: Path) -> None:
    paths, index = _index(tmp_path, samples=40)
    assert index_shards(paths, workers=7).digest == index.digest


def test_shards_of_one_name_in_two_folders_stay_apart(tmp_path: Path) -> None:
    shards = [str(write_shard(tmp_path / folder / "000.tar", [clip(0)])) for folder in ("day", "night")]
    index = index_shards(shards)
    assert [index.sample_id(i) for i in (0, 1)] == ["day/000.tar/clip00000", "night/000.tar/clip00000"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1, "shards": []}', '{"version": 2}\n{}\n', "\0"])
def test_a_file_that_is_no_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ShardError, match=r"index\.json"):
        ShardIndex.load(tmp_path / "index.json")


def _without(extension: str) -> dict[str, Any]:
    return {name: content for name, content in clip(3).items() if name != extension}


@pytest.mark.parametrize(
    ("sample", "member", "message"),
    [
        (_without("latents.npy"), "", r"has neither latents nor a video nor an image; found ['json', 'txt']"),
        (
            clip(3) | {"latents.npy": npy(np.zeros((3, 8, 8), "f4"))},
            ".latents.npy",
            "(3, 8, 8), float32, 896 of 896 bytes",
        ),
        (clip(3) | {"latents.npy": npy(np.zeros((4, 0, 8, 8), "f4"))}, ".latents.npy", "shape (4, 0, 8, 8)"),
        (
            clip(3) | {"latents.npy": npy(np.zeros((4, 3, 8, 8), "u1"))},
            ".latents.npy",
            "uint8, 896 of 896 bytes",
        ),
        (clip(3) | {"latents.npy": npy(np.zeros((4, 3, 8, 8), "f4"))[:-7]}, ".latents.npy", "3193 of 3200 bytes"),
        (clip(3) | {"latents.npy": b"jpeg"}, ".latents.npy", "cannot be read: no .npy header"),
        (clip(3) | {"latents.npy": npy(np.full((1,) * 4, None), allow_pickle=True)}, ".latents.npy", "Python objects"),
        (clip(3) | {"json": b'{"frames": 9, "height": 8}'}, ".json", "says {'frames': 9} and the latents are"),
        (clip(3) | {"json": b"{"}, ".json", "it cannot be read"),
        (clip(3) | {"json": b"[" * 100_000}, ".json", "it cannot be read"),
        (clip(3) | {"json": b'["frames"]'}, ".json", "holds a list; it must hold an object"),
        (clip(3) | {"meta.json": b"{}"}, ".meta.json", "a batch uses the name 'meta' itself"),
        (clip(3) | {"caption.txt": b"x"}, ".caption.txt", "a batch uses the name 'caption' itself"),
        (clip(3) | {"txt": b"\xff\xfe"}, ".txt", "it cannot be read: 'utf-8' codec"),
    ],
)
def test_a_sample_that_cannot_be_used_is_listed(
    tmp_path: Path, sample: dict[str, Any], member: str, message: str
) -> None:
    [(name, reason)] = _refused(sample, folder=tmp_path)
    assert name == f"clip00003{member}" and message in reason


@pytest.mark.parametrize("extension", ["pyd", "pkl", "pickle", "pth", "pt", "text_embeds.PTH"])
def test_a_pickle_is_left_alone_and_its_sample_is_not(tmp_path: Path, extension: str) -> None:
    bomb = {extension: pickle.dumps(Bomb(tmp_path / "ran"))}
    index = index_shards([str(write_shard(tmp_path / "000.tar", [clip(1), clip(2) | bomb]))])
    assert index.samples.keys == ("clip00001", "clip00002") and index.refused == ()
    assert index.shards[0].ignored == (extension,), "and it is told of"
    assert list(SampleReader(index).read(1)) == ["latents", "json", "caption"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("extension", ["pth", "pt", "latents.pth", "latents.PT"])
def test_latents_in_a_pickle_come_with_the_way_to_convert_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    file, latents = io.BytesIO(), torch.randn(4, 3, 8, 8)
    torch.save(latents, file)
    [(name, reason)] = _refused(_without("latents.npy") | {extension: file.getvalue()}, folder=tmp_path)
    assert name == f"clip00003.{extension}" and "it is a pickle" in reason

    _, *program = reason.splitlines()
    (tmp_path / name).write_bytes(file.getvalue())
    monkeypatch.chdir(tmp_path)
    assert len(program) == 3
    exec("\n".join(line.strip() for line in program).replace("FILE", name).replace("KEY", "clip00003"), {})
    converted = _without("latents.npy") | {"latents.npy": (tmp_path / "clip00003.latents.npy").read_bytes()}
    index = index_shards([str(write_shard(tmp_path / "001.tar", [converted]))])
    assert torch.allclose(SampleReader(index).read(0)["latents"].float(), latents, atol=1e-2)


def test_latents_in_a_pickle_are_not_left_for_the_video_beside_them(tmp_path: Path) -> None:
    [(name, _)] = _refused({"__key__": "both", "mp4": b"...", "latents.pth": b"..."}, folder=tmp_path)
    assert name == "both.latents.pth", "it would train on other things than are meant"


def test_a_bare_npy_is_told_its_name(tmp_path: Path) -> None:
    array = npy(np.zeros((4, 3, 8, 8), "f4"))
    [(name, reason)] = _refused(_without("latents.npy") | {"npy": array}, folder=tmp_path)
    assert name == "clip00003.npy" and "'clip00003.latents.npy'" in reason


def test_dots_belong_to_the_key_where_every_member_of_it_has_them(tmp_path: Path) -> None:
    dotted = [clip(i) | {"__key__": f"movie.v{i}.0", "mask.npy": npy(np.ones(i))} for i in (1, 2)]
    index = index_shards([str(write_shard(tmp_path / "000.tar", dotted))])
    assert index.samples.keys == ("movie.v1.0", "movie.v2.0") and index.refused == ()
    read = SampleReader(index).read(1)
    assert read["latents"].mean() == 2 and read["caption"] == "a caption, n° 2" and len(read["mask"]) == 2

    orphan = {"__key__": "movie.v3.0", "txt": b"its video was never written"}
    index = index_shards([str(write_shard(tmp_path / "000.tar", [*dotted, orphan]))])
    assert index.samples.keys == ("movie.v1.0", "movie.v2.0")
    assert [refusal.member for _, refusal in index.refused] == ["movie.v3.0"]

    photos = [{"__key__": f"album.{i}", "jpg": picture(), "txt": b"a photo"} for i in range(2)]
    named = [{"__key__": "album", "first.jpg": picture(), "last.jpg": picture()}]
    assert index_shards([str(write_shard(tmp_path / "001.tar", photos))]).samples.keys == ("album.0", "album.1")
    [(_, refusal)] = index_shards([str(write_shard(tmp_path / "002.tar", named))]).refused
    assert "ends at the first dot" in refusal.reason


def test_many_dotted_samples_are_told_apart_quickly() -> None:
    at = ByteRange(0, 1)
    members = {f"{i:05}.{extension}": at for i in range(30_000) for extension in ("mp4", "txt", "json")}
    samples = split_dotted("scene", members)
    assert len(samples) == 30_000 and samples["scene.00007"] == {"mp4": at, "txt": at, "json": at}
    assert split_dotted("scene", members | {"txt": at}) == {"scene": members | {"txt": at}}, "one text of all of them"


def test_one_dotted_sample_that_is_hostile_leaves_the_others(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "000.tar", "w") as tar:
        for i in range(3):
            for extension, content in clip(i).items():
                member = tarfile.TarInfo(f"clip.{i}.{extension}")
                if i == 1 and extension == "txt":
                    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                if extension != "__key__":
                    member.size = len(content) if member.isreg() else 0
                    tar.addfile(member, io.BytesIO(content))
    index = index_shards([str(tmp_path / "000.tar")])
    assert index.samples.keys == ("clip.0", "clip.2")
    assert [refusal.member for _, refusal in index.refused] == ["clip.1.txt"]


def test_damage_in_a_tar_costs_what_lies_behind_it(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(i) for i in range(4)])
    whole = shard.read_bytes()
    shard.write_bytes(whole[: whole.index(b"clip00002.txt") + 512 + 3])
    index = index_shards([str(shard)])
    assert index.samples.keys == ("clip00000", "clip00001")
    (name, (member, reason)) = index.refused[-1]
    assert name == "000.tar" and member == "" and "damaged" in reason


def test_embeddings_may_stand_for_the_caption(tmp_path: Path) -> None:
    sample = _without("txt") | {"text_embeds.npy": npy(np.zeros((7, 16), "f2"))}
    index = index_shards([str(write_shard(tmp_path / "000.tar", [sample]))])
    assert sorted(index.samples[0].members) == ["json", "latents.npy", "text_embeds.npy"]
    assert index.samples.clips.caption_length.tolist() == [0]


@pytest.mark.parametrize("extension", ["latents.safetensors", "safetensors"])
def test_latents_may_be_safetensors(tmp_path: Path, extension: str) -> None:
    latents = torch.arange(2 * 3 * 4 * 4, dtype=torch.bfloat16).view(2, 3, 4, 4)
    content = safetensors.torch.save({"latents": latents, "other": torch.zeros(0)})
    assert torch.equal(read_tensors(content)["latents"], latents)
    sample = _without("latents.npy") | {extension: content, "json": b"{}"}
    index = index_shards([str(write_shard(tmp_path / "000.tar", [sample]))])
    assert index.samples[0].shape == (2, 3, 4, 4) and next(iter(index.samples[0].members)) == extension


def test_tensors_beside_the_latents_in_one_file_are_told_of(tmp_path: Path) -> None:
    tensors = {"latents": torch.zeros(2, 3, 4, 4), "text_embeds": torch.zeros(3, 8)}
    sample = _without("latents.npy") | {"safetensors": safetensors.torch.save(tensors), "json": b'{"long": "text"}'}
    paths = [str(write_shard(tmp_path / "000.tar", [sample]))]
    index = index_shards(paths)
    assert index.shards[0].ignored == ("safetensors:text_embeds",)
    again = index_shards(paths, index.shards, caption_key="long")
    assert again.shards[0].ignored == index.shards[0].ignored, "also where only captions are read again"


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
     "uint8", "bool"],
)  # fmt: skip
def test_tensors_are_read_as_by_the_safetensors_library(dtype: str) -> None:
    numbers = torch.arange(6).view(2, 3).to(getattr(torch, dtype))
    content = safetensors.torch.save({"matrix": numbers, "number": numbers[1, 2].clone(), "none": numbers[:0].clone()})
    for name, expected in safetensors.torch.load(content).items():
        found = read_tensors(content)[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
        found.zero_()  # memory of its own, not the shard's bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (b"\xff" * 50, "no safetensors header"),
        (safetensors.torch.save({"latents": torch.zeros(1, 2, 2, 2)})[:-1], "lies at bytes 0:32 of 31"),
        (safetensors.torch.save({"a": torch.zeros(1), "b": torch.zeros(1)}), "name one of them 'latents'"),
        (safetensors.torch.save({"a": torch.zeros(1, 1, 1, 1, dtype=torch.complex64)}), "type 'C64' are not read"),
        (
            safetensors.torch.save({"a": torch.zeros(1, 1, 1, 1, dtype=torch.int64)}),
            "torch.int64, 8 bytes",
        ),
    ],
)
def test_damaged_safetensors_are_listed(tmp_path: Path, content: bytes, message: str) -> None:
    [(name, reason)] = _refused(_without("latents.npy") | {"safetensors": content}, folder=tmp_path)
    assert name == "clip00003.safetensors" and message in reason


def test_formats_that_are_not_decoded_are_kept_in_mind(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0, mp4=b"..."), clip(1, jpg=b"...", mp4=b"...")])
    index = index_shards([str(shard)])
    assert index.shards[0].ignored == ("jpg", "mp4")
    assert sorted(index.samples[1].members) == ["json", "latents.npy", "txt"]


def test_no_samples_at_all_is_an_error(tmp_path: Path) -> None:
    empty, broken = (
        write_shard(tmp_path / "empty.tar", []),
        write_shard(tmp_path / "broken.tar", [_without("latents.npy")]),
    )
    with pytest.raises(ShardError, match=r"empty\.tar"):
        index_shards([str(empty)]).check()
    with pytest.raises(ShardError, match=r"1 refused.*broken\.tar.*'clip00003'"):
        index_shards([str(empty), str(broken)]).check()
    index_shards([str(empty), str(write_shard(tmp_path / "one.tar", [clip(0)]))]).check()


def test_latents_of_different_channels_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1), clip(2, (16, 3, 8, 8))])
    with pytest.raises(ShardError, match=r"4 in 000\.tar/clip00000, 16 in 000\.tar/clip00002"):
        index_shards([str(shard)]).check()


def test_key_frames_to_seek_are_kept_and_an_index_without_them_is_read(tmp_path: Path) -> None:
    """They decide how fast a cut is read and not what it holds, so the digest leaves them out."""
    long = film([numbered(i % 50, 16, 16) for i in range(150)], codec_options={"g": "20", "sc_threshold": "0"})
    samples = [{"__key__": "a", "mp4": film([numbered(1)] * 3)}, {"__key__": "b", "mp4": long}]
    shard = str(write_shard(tmp_path / "000.tar", samples))
    file = tmp_path / "index"
    index = build_index([shard, str(write_shard(tmp_path / "001.tar", samples[1:]))], file)
    assert [len(sample.seeks) for sample in index.samples] == [0, 2, 2]
    assert index.samples[1].seeks == index.samples[2].seeks
    assert list(ShardIndex.load(file).samples) == list(index.samples)

    rows = [json.loads(shard_line(shard, tmp_path)) for shard in index.shards]
    for row in rows:
        for name in ("seek_counts", "seek_stamp", "seek_begin"):
            del row["samples"][name]
    file = tmp_path / "older.jsonl"
    file.write_text("".join([header_line(), *(json.dumps(row) + "\n" for row in rows)]))
    old = ShardIndex.load(file)
    assert old.digest == index.digest and not any(sample.seeks for sample in old.samples)
    cut = Cut(ClipShape(3, 16, 16), start=5.0, fps=25.0)
    assert torch.equal(SampleReader(old).pixels(1, cut), SampleReader(index).pixels(1, cut))
    assert numbers(SampleReader(old).pixels(1, cut)) == [25, 26, 27]
