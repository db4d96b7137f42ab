"""The table of all samples: what is in it, when it is read again, and which samples are refused."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale.data import ShardError, ShardIndex
from lightning_videoscale.data.index import ShardEntry, default_index_file
from lightning_videoscale.data.shards import expand_shards
from tests.data.clips import SHAPES, clip, npy, write_shard, write_shards
from tests.data.test_decoding import Bomb


def _index(folder: Path, samples: int = 12) -> tuple[list[Path], ShardIndex]:
    paths = expand_shards(write_shards(folder, samples))
    return paths, ShardIndex.scan(paths)


def test_samples_are_numbered_in_the_order_of_the_shards(tmp_path: Path) -> None:
    _, index = _index(tmp_path)
    assert len(index) == 12
    assert [index.sample_id(i) for i in (0, 1, 5, 6, 11)] == [
        "000.tar/clip00000", "000.tar/clip00002", "000.tar/clip00010", "001.tar/clip00001", "001.tar/clip00011",
    ]  # fmt: skip
    assert {sample.shape for sample in index.samples} <= set(SHAPES)
    assert sorted(index.samples[0].members) == ["json", "latents.npy", "txt"]


def test_a_saved_index_is_the_same_index_also_after_a_move(tmp_path: Path) -> None:
    paths, index = _index(tmp_path / "here")
    file = default_index_file(paths)
    index.save(file)
    assert ShardIndex.load(file) == index
    assert file.parent == paths[0].parent and file.name.startswith("videoscale-index-")
    assert os.listdir(file.parent).count(file.name) == 1 and len(os.listdir(file.parent)) == 3

    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = ShardIndex.load(tmp_path / "there" / file.name)
    assert moved.digest == index.digest
    assert all(shard.is_current() for shard in moved.shards)


def test_digest_sees_what_a_plan_reads_and_nothing_else(tmp_path: Path) -> None:
    _, index = _index(tmp_path / "a")
    paths, same = _index(tmp_path / "b")
    os.utime(paths[0], (0, 0))
    assert index.digest == same.digest == ShardIndex.scan(paths).digest
    assert index.digest != ShardIndex.scan(paths[::-1]).digest
    write_shard(paths[0], [clip(99)])
    assert index.digest != ShardIndex.scan(paths).digest


def test_only_changed_shards_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, index = _index(tmp_path)
    scanned = []
    scan: Callable[[Path], ShardEntry] = ShardEntry.scan
    monkeypatch.setattr(ShardEntry, "scan", lambda path: scanned.append(path) or scan(path))
    assert ShardIndex.scan(paths, index) == index
    assert scanned == []

    write_shard(paths[1], [clip(99)])
    changed = ShardIndex.scan(paths, index)
    assert scanned == [paths[1]]
    assert changed.sample_id(6) == "001.tar/clip00099"
    assert len(ShardIndex.scan([paths[0], write_shard(tmp_path / "new.tar", [clip(7)])], index)) == 7


def test_shards_of_one_name_in_two_folders_stay_apart(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / folder / "000.tar", [clip(0)]) for folder in ("day", "night")]
    index = ShardIndex.scan(shards)
    assert [index.sample_id(i) for i in (0, 1)] == ["day/000.tar/clip00000", "night/000.tar/clip00000"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}', '{"version": 99, "shards": []}', "\0"])
def test_a_file_that_is_no_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ShardError, match=r"index\.json is not a shard index .*delete it"):
        ShardIndex.load(tmp_path / "index.json")


def _without(extension: str) -> dict[str, Any]:
    return {name: content for name, content in clip(3).items() if name != extension}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            _without("latents.npy"),
            r"sample 'clip00003' has no member 'clip00003\.latents\.npy'. Found \['json', 'txt'\]",
        ),
        (_without("txt"), r"has no member 'clip00003\.txt'. Found \['json', 'latents.npy'\]. A sample has"),
        (clip(3) | {"latents.npy": npy(np.zeros((3, 8, 8), "f4"))}, r"shape \(3, 8, 8\), float32.*\(C, F, H, W\)"),
        (clip(3) | {"latents.npy": npy(np.zeros((4, 0, 8, 8), "f4"))}, r"shape \(4, 0, 8, 8\)"),
        (clip(3) | {"latents.npy": npy(np.zeros((4, 3, 8, 8), "u1"))}, r"uint8.*float16 or float32"),
        (clip(3) | {"latents.npy": npy(np.zeros((4, 3, 8, 8), "f4"))[:-7]}, r"3193 of 3200 bytes"),
        (clip(3) | {"latents.npy": b"jpeg"}, r"latents that cannot be read: no \.npy header"),
        (clip(3) | {"latents.npy": npy(np.full((1, 1, 1, 1), None), allow_pickle=True)}, r"Python objects"),
        (clip(3) | {"json": b'{"frames": 9, "height": 8}'}, r"says {'frames': 9} in its \.json .*'frames': 3"),
        (clip(3) | {"json": b"{"}, r"a \.json that cannot be read"),
        (clip(3) | {"json": b"[" * 100_000}, r"a \.json that cannot be read"),
        (clip(3) | {"json": b'["frames"]'}, r"holds a list; it must hold an object"),
        (clip(3) | {"meta.json": b"{}"}, r"named \['meta'\], which a batch uses itself"),
        (clip(3) | {"caption.txt": b"x"}, r"named \['caption'\], which a batch uses itself"),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(tmp_path: Path, sample: dict[str, Any], message: str) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(1), sample])
    with pytest.raises(ShardError, match=rf"000\.tar: the sample 'clip00003'.*{message}|{message}"):
        ShardIndex.scan([shard])


@pytest.mark.parametrize("extension", ["pyd", "pkl", "pickle", "pth", "pt", "text_embeds.PTH"])
def test_a_shard_with_pickles_is_refused_by_member(tmp_path: Path, extension: str) -> None:
    bomb = {extension: pickle.dumps(Bomb(tmp_path / "ran"))}
    shard = write_shard(tmp_path / "000.tar", [clip(1), clip(2) | bomb])
    with pytest.raises(
        ShardError, match=rf"000\.tar: the member 'clip00002\.{extension.lower()}' is a pickle|is a pickle"
    ):
        ShardIndex.scan([shard])
    assert not (tmp_path / "ran").exists()


def test_embeddings_may_stand_for_the_caption(tmp_path: Path) -> None:
    sample = _without("txt") | {"text_embeds.npy": npy(np.zeros((7, 16), "f2"))}
    index = ShardIndex.scan([write_shard(tmp_path / "000.tar", [sample])])
    assert sorted(index.samples[0].members) == ["json", "latents.npy", "text_embeds.npy"]


def test_formats_that_are_not_decoded_are_kept_in_mind(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0, mp4=b"..."), clip(1, jpg=b"...", mp4=b"...")])
    index = ShardIndex.scan([shard])
    assert index.shards[0].ignored == ("jpg", "mp4")
    assert sorted(index.samples[1].members) == ["json", "latents.npy", "txt"]


def test_no_samples_at_all_is_an_error(tmp_path: Path) -> None:
    empty = write_shard(tmp_path / "empty.tar", [])
    with pytest.raises(ShardError, match=r"No samples found: the shards .*empty\.tar"):
        ShardIndex.scan([empty])
    assert len(ShardIndex.scan([empty, write_shard(tmp_path / "one.tar", [clip(0)])])) == 1


def test_latents_of_different_channels_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1), clip(2, (16, 3, 8, 8))])
    with pytest.raises(ShardError, match=r"4 in 000\.tar/clip00000.*|16 in 000\.tar/clip00002"):
        ShardIndex.scan([shard])
