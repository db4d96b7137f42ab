"""Shards behind URLs: byte ranges, retries, and what is said when it cannot work."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import ShardError, ShardIndex, VideoDataModule
from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards import storage
from lightning_videoscale.data.shards.errors import UnreachableError
from lightning_videoscale.data.shards.index import default_index_file
from lightning_videoscale.data.shards.indexing import build_index, index_shards
from lightning_videoscale.data.shards.location import ByteRange
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from lightning_videoscale.data.shards.storage import open_member, open_shard
from tests.data.clips import clip, expand_shards, npy, write_shard
from tests.data.films import film, numbered
from tests.data.servers import RangeServer, serving
from tests.object_store import object_store

QUICK = (0.01, 0.02, 0.04)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """Two shards of latents and one of a video with its caption."""
    shards = [write_shard(tmp_path / f"{i:03}.tar", [clip(4 * i + j) for j in range(4)]) for i in range(2)]
    video = film([numbered(i) for i in range(50)])
    shards.append(write_shard(tmp_path / "video.tar", [{"__key__": "a", "mp4": video, "txt": b"numbers"}]))
    with serving({shard.name: shard.read_bytes() for shard in shards}) as server:
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.open_shard, "__defaults__", (QUICK,))


def test_a_file_system_may_give_less_than_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does from 2 GiB on, and file systems of their own process may at any size."""
    index = index_shards([str(write_shard(tmp_path / "000.tar", [clip(7)]))])
    whole = SampleReader(index).read(0)["latents"]
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 100), offset))
    assert torch.equal(SampleReader(index).read(0)["latents"], whole)
    assert index_shards([str(tmp_path / "000.tar")]).digest == index.digest
    with pytest.raises(ShardError, match="ends before byte 1000000"):
        open_shard(str(tmp_path / "000.tar")).read(ByteRange(0, 1_000_000))


def test_a_remote_index_is_that_of_the_same_files_here(server: RangeServer, tmp_path: Path) -> None:
    names = ["000.tar", "001.tar", "video.tar"]
    here = index_shards([str(tmp_path / name) for name in names])
    there = index_shards([f"{server.url}/{name}" for name in names], workers=3)
    assert there.digest == here.digest
    assert [there.sample_id(i) for i in (0, 8)] == ["000.tar/clip00000", "video.tar/a"]
    readers = SampleReader(here), SampleReader(there)
    cut = Cut(ClipShape(4, 32, 48), 1.0, 5.0)
    assert torch.equal(*(reader.read(8, cut)["video"] for reader in readers))
    for i in range(8):
        ours, theirs = (reader.read(i) for reader in readers)
        assert list(ours) == list(theirs) and torch.equal(ours["latents"], theirs["latents"])
        assert theirs["caption"] == f"a caption, n° {i}"


def test_only_what_changed_is_asked_for_again(server: RangeServer, tmp_path: Path) -> None:
    urls, file = [f"{server.url}/{i:03}.tar" for i in range(2)], tmp_path / "table" / "index"
    index = build_index(urls, file)
    server.requests.clear()
    assert build_index(urls, file).digest == index.digest
    assert {first for _, first, _ in server.requests} == {-1}, "sizes and ETags, no content"
    server.files["001.tar"] = write_shard(tmp_path / "x.tar", [clip(9)]).read_bytes()
    changed = build_index(urls, file)
    assert {name for name, first, _ in server.requests if first >= 0} == {"001.tar"}
    assert ShardIndex.load(file).digest == changed.digest and changed.samples.keys[4:] == ("clip00009",)


def test_a_sample_is_one_request_and_no_more_bytes_than_it_has(server: RangeServer) -> None:
    index = index_shards([f"{server.url}/000.tar"])
    reader = SampleReader(index)
    reader.read(0)
    server.requests.clear()
    reader.read(2)
    [(_, first, last)] = server.requests
    members = index.samples[2].members.values()
    assert first == min(at.offset for at in members) and last == max(at.offset + at.size for at in members) - 1


def test_neighbouring_ranges_are_one_request(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(content := np.random.default_rng(0).bytes(300_000))
    server.files["long"] = content
    ranges = [ByteRange(*at) for at in ((200_000, 9), (7, 0), (500, 20), (0, 400), (510, 5), (700, 0), (0, 400))]
    for shard in (open_shard(f"{server.url}/long"), open_shard(str(tmp_path / "long"))):
        assert shard.read_all(ranges) == [content[at.offset : at.offset + at.size] for at in ranges]
        assert shard.read_all([]) == []
    assert sorted(server.requests) == [("long", 0, 699), ("long", 200_000, 200_008)]


def test_long_members_are_read_in_blocks(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    noise = film([draw.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(100)], codec_options={"g": "10"})
    shard = write_shard(tmp_path / "noise.tar", [{"__key__": "a", "mp4": noise}])
    server.files["noise.tar"] = shard.read_bytes()
    here = SampleReader(index_shards([str(shard)]))
    monkeypatch.setattr(storage, "_WHOLE", 4096)
    monkeypatch.setattr(storage, "_BLOCK", 8192)
    there = SampleReader(index_shards([f"{server.url}/noise.tar"]))
    assert there.index.digest == here.index.digest
    server.requests.clear()
    cut = Cut(ClipShape(4, 32, 48), 2.4, 25.0)  # from a key frame on
    assert torch.equal(there.read(0, cut)["video"], here.read(0, cut)["video"])
    sizes = [last - first + 1 for _, first, last in server.requests if first >= 0]
    assert len(sizes) > 3 and max(sizes) <= 32768 and sum(sizes) < len(noise), "only what the four frames need"

    at = ByteRange(700, 5000)
    with open_member(open_shard(f"{server.url}/000.tar"), at) as file:
        assert isinstance(file, io.BufferedReader)
        whole = server.files["000.tar"][700:5700]
        assert file.read(10) == whole[:10] and file.seek(-20, 2) == 4980 and file.read(50) == whole[-20:]
        assert file.seek(3000) == 3000 and file.read(1500) == whole[3000:4500] and file.read() == whole[4500:]


@pytest.mark.parametrize("failure", [500, 503, 429, "cut"])
def test_a_server_that_comes_back_is_waited_for(
    server: RangeServer, failure: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    shard = open_shard(f"{server.url}/000.tar", QUICK)
    server.failures, server.failure = 3, failure
    assert shard.read(ByteRange(512, 3000)) == server.files["000.tar"][512:3512]
    assert len(caplog.records) == 3 and "Trying again in 0.01 s" in caplog.text
    server.failures = 4
    with pytest.raises(ShardError, match=r"000\.tar .*4 attempts .*bytes 0 to 9\b"):
        shard.read(ByteRange(0, 9))


def test_a_server_that_is_gone_is_an_error_in_the_end(tmp_path: Path, quick: None) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0)])
    with serving({"000.tar": shard.read_bytes()}) as server:
        index = index_shards([f"{server.url}/000.tar"])
        reader = SampleReader(index)
        reader.read(0)
    with pytest.raises(ShardError, match=r"4 attempts"):
        reader.read(0)
    with pytest.raises(ShardError, match=r"1 samples or shards .*000\.tar: .* 4 attempts .*size"):
        index_shards([f"{server.url}/000.tar"]).check()


def test_what_is_missing_is_not_waited_for(server: RangeServer) -> None:
    with pytest.raises(ShardError, match=r"none\.tar .*404"):
        index_shards([f"{server.url}/{name}.tar" for name in ("000", "001", "none")])
    assert {first for _, first, _ in server.requests} == {-1}, "said before the others are looked at"
    with pytest.raises(ShardError, match=r"nowhere://host/000\.tar .*Protocol not known"):
        index_shards(["nowhere://host/000.tar"])


def test_a_refused_permission_is_asked_for_again_but_not_for_long(server: RangeServer) -> None:
    shard = open_shard(f"{server.url}/000.tar", QUICK)
    server.failures, server.failure = 2, 403
    assert shard.read(ByteRange(0, 9)) == server.files["000.tar"][:9]
    server.failures = 3
    with pytest.raises(UnreachableError, match=r"000\.tar .*3 attempts .*403"):
        shard.read(ByteRange(0, 9))


def test_a_server_without_ranges_is_refused(server: RangeServer, tmp_path: Path, quick: None) -> None:
    server.honours_ranges = False
    urls = [f"{server.url}/000.tar"]
    with pytest.raises(ShardError, match=r"byte ranges .*\d+ bytes instead of \d+"):
        build_index(urls, tmp_path / "index")
    server.honours_ranges = True
    assert len(build_index(urls, tmp_path / "index")) == 4, "of the shard nothing was concluded"


def test_a_remote_shard_that_changed_is_named(server: RangeServer) -> None:
    index = index_shards([f"{server.url}/000.tar"])
    server.files["000.tar"] = server.files["001.tar"] + bytes(512)
    with pytest.raises(ShardError, match=r"000\.tar has \d+ bytes and had \d+"):
        SampleReader(index).read(0)


def test_any_file_system_of_fsspec(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(i) for i in range(3)])
    with fsspec.open("memory://bucket/000.tar", "wb") as file:
        file.write(shard.read_bytes())
    index = index_shards(["memory://bucket/000.tar"])
    assert index.digest == index_shards([str(shard)]).digest
    assert SampleReader(index).read(1)["latents"].mean() == 1
    assert default_index_file(["memory://bucket/000.tar"]).parent == Path.home() / ".cache" / "lightning-videoscale"


def test_an_object_store(tmp_path: Path) -> None:
    """Listed, indexed, and read by ranges, also in forked workers."""
    shards = [write_shard(tmp_path / f"{i:03}.tar", [clip(4 * i + j) for j in range(4)]) for i in range(2)]
    with object_store() as store:
        for shard in shards:
            store.put(f"shards/{shard.name}", shard.read_bytes())
        index = index_shards(expand_shards("s3://bucket/shards/*.tar"))
        assert index.digest == index_shards([str(shard) for shard in shards]).digest
        reader = SampleReader(index)
        assert reader.read(1)["latents"].mean() == 1
        loader: DataLoader[Any] = DataLoader(
            _Numbers(reader), num_workers=1, multiprocessing_context="fork", timeout=60
        )
        assert [float(number) for number in loader] == [float(i) for i in range(8)]
        with pytest.raises(ShardError, match="cannot be read"):
            index_shards(["s3://nobodys/000.tar"])


class _Numbers(torch.utils.data.Dataset[float]):
    def __init__(self, reader: SampleReader) -> None:
        self.reader = reader

    def __getitem__(self, number: int) -> float:
        return float(self.reader.read(number)["latents"].mean())

    def __len__(self) -> int:
        return len(self.reader.index)


def test_forked_workers_read_from_servers_that_this_process_has_read_from(server: RangeServer) -> None:
    reader = SampleReader(index_shards([f"{server.url}/{i:03}.tar" for i in range(2)]))
    reader.read(0)
    loader: DataLoader[Any] = DataLoader(_Numbers(reader), num_workers=2, multiprocessing_context="fork", timeout=60)
    assert [float(number) for number in loader] == [float(i) for i in range(8)]


def test_a_data_module_trains_from_a_server(server: RangeServer, tmp_path: Path) -> None:
    budget = BucketBudget(200, 1e9, 2.0)
    data = VideoDataModule(f"{server.url}/{{000..001}}.tar", tmp_path / "index", budget=budget)
    data.prepare_data()
    data.setup("fit")
    ids = [name for batch in data.train_dataloader() for name in batch["sample_ids"]]
    assert sorted(ids) == [f"{i // 4:03}.tar/clip{i:05}" for i in range(8)]


def test_latents_and_captions_in_one_remote_shard_of_many_kinds(tmp_path: Path) -> None:
    big = {"__key__": "big", "latents.npy": npy(np.zeros((4, 3, 128, 128), "f4")), "txt": b"big"}
    shard = write_shard(tmp_path / "000.tar", [clip(0), big])
    with serving({"000.tar": shard.read_bytes()}) as server:
        index = index_shards([f"{server.url}/000.tar"])
        assert [Media(kind) for kind in index.samples.clips.media] == [Media.LATENTS] * 2
        asked = sum(last - first + 1 for _, first, last in server.requests if first >= 0)
        assert asked < len(shard.read_bytes()) * 2


def test_an_object_that_is_replaced_by_one_of_its_size_is_noticed(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{server.url}/000.tar"
    readers = [SampleReader(index_shards([name])) for _ in range(2)]
    readers[0].read(0), readers[0].read(1)
    assert server.requests.count(("000.tar", -1, -1)) == 3, "asked for its version when it is opened, not at every read"
    server.files["000.tar"] = server.files["001.tar"]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    for either in readers:
        with pytest.raises(ShardError, match=r"000\.tar was written again"):
            either.read(1)
