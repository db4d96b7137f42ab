"""Whether shards have changed is asked for by one rank, many at a time, and heard by all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_videoscale.data import ShardError
from lightning_videoscale.data.loading.shard_versions import shared_versions
from lightning_videoscale.data.shards.indexing import Version, versions_of
from tests.data.clips import clip, write_shard
from tests.data.servers import serving
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


def _versions(shards: list[str], folders: list[str] | None = None) -> list[Version] | str:
    """What a rank hears; with ``folders``, each rank is a node of its own, which has the shards in its own folder."""
    before, environment = Path.cwd(), {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")}
    nodes = 1 if folders is None else len(folders)
    if folders is not None:
        os.chdir(folders[int(environment["RANK"])])
        os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": environment["RANK"]}
    try:
        trainer = trainer_with(strategy="ddp", devices=2 // nodes, num_nodes=nodes)
        assert (trainer.world_size, trainer.global_rank) == (2, int(environment["RANK"]))
        return shared_versions(trainer, shards)
    except ShardError as error:
        return str(error)
    finally:
        os.chdir(before)
        os.environ |= environment


def test_one_rank_asks_and_all_hear(tmp_path: Path, ranks: Ranks) -> None:
    content = write_shard(tmp_path / "000.tar", [clip(0)]).read_bytes()
    with serving({f"{i:03}.tar": content for i in range(3)}) as server:
        urls = [f"{server.url}/{i:03}.tar" for i in range(3)]
        heard = ranks(2).run(_versions, [*urls, str(tmp_path / "000.tar")])
        assert sorted(server.requests) == [(f"{i:03}.tar", -1, -1) for i in range(3)]
        assert heard == [versions_of([*urls, str(tmp_path / "000.tar")])] * 2


@pytest.mark.parametrize("shards", [["none.tar"], ["000.tar", "none.tar"]])
def test_a_shard_that_is_missing_is_an_error_of_all_ranks(tmp_path: Path, ranks: Ranks, shards: list[str]) -> None:
    write_shard(tmp_path / "000.tar", [clip(0)])
    messages = ranks(2).run(_versions, [str(tmp_path / shard) for shard in shards])
    assert all("none.tar cannot be read" in str(message) for message in messages)


def test_nodes_with_copies_of_their_own_ask_for_themselves(tmp_path: Path, ranks: Ranks) -> None:
    """Copies are equally long, and were written at another time."""
    folders = [str(write_shard(tmp_path / node / "000.tar", [clip(0)]).parent) for node in ("a", "b")]
    for seconds, folder in enumerate(folders, 1):
        os.utime(Path(folder) / "000.tar", (seconds, seconds))
    ours, theirs = ranks(2).run(_versions, ["000.tar"], folders)
    assert [ours[0].stamp, theirs[0].stamp] == ["1000000000", "2000000000"] and ours[0].size == theirs[0].size

    os.utime(Path(folders[1]) / "000.tar", (1, 1))
    assert ranks(2).run(_versions, ["000.tar"], folders) == [ours] * 2


def test_many_shards_are_asked_for_at_a_time(tmp_path: Path) -> None:
    content = write_shard(tmp_path / "000.tar", [clip(0)]).read_bytes()
    names = [f"{i:03}.tar" for i in range(100)]
    with serving(dict.fromkeys(names, content)) as server:
        server.delay = 0.05
        found = versions_of([f"{server.url}/{name}" for name in names])
    assert len(found) == len(server.requests) == 100 and {version.size for version in found} == {len(content)}
    assert server.most_at_a_time > 3
