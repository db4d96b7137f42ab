"""What a network does for a moment is never taken for what the data is."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from lightning_videoscale.cli import main
from lightning_videoscale.data import BatchMeta, MicroBatch, ShardError, ShardIndex, VideoDataModule
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.data.shards import storage
from lightning_videoscale.data.shards.errors import UnreachableError
from lightning_videoscale.data.shards.indexing import build_index, index_shards
from lightning_videoscale.data.shards.patterns import expand_each
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from tests.data.clips import clip, write_shard
from tests.data.films import film, numbered
from tests.data.servers import RangeServer, serving

QUICK = (0.01, 0.02, 0.04)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """Two shards of latents with ``.txt``, and one of videos with captions in ``.json``; short pauses."""
    monkeypatch.setattr(storage.open_shard, "__defaults__", (QUICK,))
    video, text = film([numbered(i) for i in range(10)]), "a long caption " * 100
    fields = json.dumps({"caption": text}).encode()
    clips = [clip(i, txt=text.encode()) for i in range(8)]
    shards = [write_shard(tmp_path / f"{i:03}.tar", clips[4 * i : 4 * i + 4]) for i in range(2)]
    films = [{"__key__": f"film{i}", "mp4": video, "json": fields} for i in range(4)]
    shards.append(write_shard(tmp_path / "002.tar", films))
    with serving({shard.name: shard.read_bytes() for shard in shards}) as server:
        yield server


def _urls(server: RangeServer) -> list[str]:
    return [f"{server.url}/{i:03}.tar" for i in range(3)]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 60))])
@pytest.mark.parametrize("pauses", [QUICK, ()], ids=["retries", "no retries"])
def test_one_request_in_ten_may_fail_anyhow(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, pauses: tuple[float, ...]
) -> None:
    """Even without retries nothing good is ever refused; with them, three runs are enough to see everything."""
    monkeypatch.setattr(storage.open_shard, "__defaults__", (pauses,))
    here, server.weather = index_shards([str(tmp_path / f"{i:03}.tar") for i in range(3)]), Random(seed)
    for _ in range(3 if pauses else 20):
        index = build_index(_urls(server), tmp_path / "index", workers=2)
        assert (index.refused == () and len(index) == 12 - len(index.unread)) or any(
            not m for _, (m, _) in index.unread
        )
        if not index.unread:
            break
    assert index.unread == () and index.digest == here.digest == ShardIndex.load(tmp_path / "index").digest


@pytest.mark.parametrize("seed", range(2))
def test_a_server_without_ranges_is_an_error_in_any_weather(server: RangeServer, tmp_path: Path, seed: int) -> None:
    server.weather, server.honours_ranges = Random(seed), False
    for _ in range(3):
        with pytest.raises(ShardError, match="byte ranges"):
            build_index(_urls(server), tmp_path / "index", workers=2)
    server.weather, server.honours_ranges = None, True
    index = build_index(_urls(server), tmp_path / "index")
    assert (index.refused, index.unread, len(index)) == ((), (), 12)


@pytest.mark.parametrize("seed", range(4))
def test_whole_shards_are_kept_of_a_server_without_ranges(server: RangeServer, tmp_path: Path, seed: int) -> None:
    """By fsspec's ``simplecache::``, as the error advises."""
    server.weather, server.honours_ranges = Random(seed), False
    for _ in range(3):
        index = build_index([f"simplecache::{url}" for url in _urls(server)], tmp_path / "index", workers=2)
        assert index.refused == ()
    assert (index.unread, len(index)) == ((), 12)
    assert SampleReader(index).read(2)["latents"].mean() == 2.0


def _break(server: RangeServer, number: int, member: str, failure: int | str) -> None:
    """No request that covers a certain byte of a member succeeds any more."""
    shard = index_shards([_urls(server)[number]])
    server.broken, server.failure = (f"{number:03}.tar", shard.samples[2].members[member].offset + 700), failure


@pytest.mark.parametrize(
    ("number", "member", "failure"),
    [(0, "txt", 403), (0, "txt", "reset"), (0, "latents.npy", "cut"), (2, "mp4", 503), (2, "json", "cut")],
)
def test_what_fails_all_attempts_is_left_for_the_next_run(
    server: RangeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    member: str,
    failure: int | str,
) -> None:
    monkeypatch.setattr(storage, "_HEADER_BLOCK", 512)
    _break(server, number, member, failure)
    command = ["index", _urls(server)[number], "--index", str(tmp_path / "index"), "--json"]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    [unread] = report["unread"]
    assert report["refused"] == [] and report["indexed"] == 3
    assert unread["member"] in ("clip00002", "film2") and "attempts at its bytes" in unread["reason"]
    with pytest.raises(ShardError, match=r"1 samples .*`videoscale index`"):
        ShardIndex.load(tmp_path / "index").check()

    server.broken = None
    server.requests.clear()
    assert main(command) == 0
    main_member = next(iter(ShardIndex.load(tmp_path / "index").samples[0].members.values()))
    whole = [last for _, first, last in server.requests if last - first + 1 == main_member.size]
    assert len(whole) == 1, "of what is known only the captions are read again"
    report = json.loads(capsys.readouterr().out)
    assert (report["indexed"], report["unread"], report["without_caption"]) == (4, [], 0)
    assert ShardIndex.load(tmp_path / "index").digest == index_shards([str(tmp_path / f"{number:03}.tar")]).digest


def test_a_member_read_in_blocks_is_not_damaged_because_a_block_did_not_come(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_WHOLE", 256)
    monkeypatch.setattr(storage, "_BLOCK", 512)
    monkeypatch.setattr(storage, "_HEADER_BLOCK", 512)
    film2 = index_shards(_urls(server)[2:]).samples[2].members["mp4"]
    for offset in range(film2.offset + 600, film2.offset + film2.size, 400):
        server.broken = ("002.tar", offset)
        index = index_shards(_urls(server)[2:])
        assert index.refused == () and {member for _, (member, _) in index.unread} <= {"film2"}
    server.broken = None
    reader = SampleReader(index_shards(_urls(server)[2:]))
    server.broken = ("002.tar", film2.offset + film2.size // 2)
    with pytest.raises(UnreachableError, match="after 4 attempts"):
        reader.read(2, Cut(ClipShape(10, 32, 32), fps=25.0))


def test_a_server_that_is_gone_is_waited_for_once(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_index(_urls(server)[:1], tmp_path / "index")
    server.failures, server.failure = 10**6, 503
    with caplog.at_level(logging.WARNING):
        index = build_index(_urls(server), tmp_path / "index")
    assert len(caplog.records) == len(QUICK), "not at every shard and sample"
    assert [name for name, _ in index.unread] == ["001.tar", "002.tar"] and len(index) == 4


def test_training_does_not_begin_without_what_was_not_read(server: RangeServer, tmp_path: Path) -> None:
    data = VideoDataModule(_urls(server)[:2], tmp_path / "index")
    server.failures, server.failure = 10**6, "cut"
    data.prepare_data()
    with pytest.raises(ShardError, match=r"2 samples or shards"):
        data.setup("fit")
    server.failures = 0
    data.setup("fit")
    assert len(data.training_shapes()[0]) == 8


@pytest.mark.parametrize("failure", [503, "cut", "reset"])
def test_while_training_a_sample_comes_back_when_its_server_does(server: RangeServer, failure: int | str) -> None:
    reader = MicroBatchReader(index_shards(_urls(server)[:1]))
    micro_batch = MicroBatch((2, 3), BatchMeta(3, 8, 8, 48, 2, 1.0, 1.0))
    broken = reader._index.samples[2].members["latents.npy"]
    server.broken, server.failure = ("000.tar", broken.offset + 700), failure
    with pytest.warns(UserWarning, match="weight 0"):
        batch = reader[micro_batch]
    server.broken = None
    assert batch["sample_ids"] == ["000.tar/clip00003"] and batch["meta"].loss_weight == 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = reader[micro_batch]
    assert len(batch["sample_ids"]) == 2 and batch["meta"].loss_weight == 1.0
    assert torch.equal(batch["latents"].mean(dim=(1, 2, 3, 4)), torch.tensor([2.0, 3.0]))


def test_a_chain_of_fsspec_is_one_pattern_and_webdatasets_separator_stays() -> None:
    """``simplecache::`` is advised by an error, and given to `VideoDataModule`."""
    assert expand_each("s3://bucket/a.tar::s3://bucket/b.tar") == [["s3://bucket/a.tar", "s3://bucket/b.tar"]]
    chained = "simplecache::https://host/{000..001}.tar::s3://bucket/a.tar"
    assert expand_each(chained) == [
        ["simplecache::https://host/000.tar", "simplecache::https://host/001.tar", "s3://bucket/a.tar"]
    ]
