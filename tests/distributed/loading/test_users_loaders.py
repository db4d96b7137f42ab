"""Loaders of users' own: every sample is trained once, or all ranks are told why it would not be."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.clips import clip, write_shard
from tests.distributed.loading.users import SAMPLES, STRATEGIES, fit, loader_of
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


def train(pool: ProcessPool, strategy: str, kind: str, folder: Path, **kwargs: Any) -> list[Any]:
    for shard in range(4):
        if not (folder / f"{shard}.tar").exists():
            write_shard(folder / f"{shard}.tar", [clip(i) for i in range(4 * shard, 4 * shard + 4)])
    return pool.run(fit, strategy, 2, loader_of, kind, str(folder / "{0..3}.tar"), **kwargs)


SHARDED = {
    "distributed sampler": "the DistributedSampler of their loader is for rank 0 of {world} (this is data-parallel",
    "sampler of the world": "the DistributedSampler of their loader is for rank 0 of {world} (this is data-parallel",
    "split by node": "webdataset's split_by_node gives each of them other shards",
    "shuffled and split by node": "webdataset's split_by_node gives each of them other shards",
    "stride": "the first data of their loaders differ",
    "subset": "their datasets are different subsets",
    "subset, cropped": "their datasets are different subsets",
    "files": "the first data of their loaders differ",
}
ORDERED = ["numpy", "torch", "python"]
RIGHT = [
    "distributed sampler by place",
    "split by place",
    "shuffled, split by place",
    "stride by place",
    "stride by place, cropped",
    "shuffled",
    "sampler of its own",
    "shuffled alike",
    "cropped",
    "cropped by its own",
]


def some_or_all(kinds: Any, some: set[tuple[str, str, int]]) -> list[Any]:
    """Cases (strategy, kind, world), of which all but some are left to the full suite."""
    cases = itertools.product(STRATEGIES, kinds, (2, 4))
    return [case if case in some else pytest.param(*case, marks=pytest.mark.full) for case in cases]


SOME_SHARDED = {
    ("ddp", "distributed sampler", 4),
    ("fsdp2", "sampler of the world", 4),
    ("fsdp2", "split by node", 2),
    ("ddp", "shuffled and split by node", 4),
    ("fsdp2", "stride", 4),
    ("ddp", "subset, cropped", 2),
    ("ddp", "files", 4),
}


@pytest.mark.parametrize(("strategy", "kind", "world"), some_or_all(SHARDED, SOME_SHARDED))
def test_sharding_by_the_global_rank_is_refused(
    ranks: Ranks, tmp_path: Path, strategy: str, kind: str, world: int
) -> None:
    messages = train(ranks(world), strategy, kind, tmp_path)
    for rank, message in enumerate(messages):
        group = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert f"Ranks {group} train on one batch" in message
        assert "strategy.data_parallel_rank and strategy.data_parallel_size" in message
    assert SHARDED[kind].format(world=world) in messages[0]


SOME_ORDERED = {("ddp", "numpy", 4), ("fsdp2", "torch", 2), ("ddp", "python", 2)}


@pytest.mark.parametrize(("strategy", "kind", "world"), some_or_all(ORDERED, SOME_ORDERED))
def test_a_sampler_that_no_seed_governs_is_refused(
    ranks: Ranks, tmp_path: Path, strategy: str, kind: str, world: int
) -> None:
    for message in train(ranks(world), strategy, kind, tmp_path, use_distributed_sampler=False):
        assert "BatchSampler" in message and "from micro-batch 0 on" in message


SOME_RIGHT = {
    ("ddp", "distributed sampler by place", 4),
    ("fsdp2", "split by place", 4),
    ("ddp", "shuffled, split by place", 4),
    ("ddp", "stride by place", 4),
    ("ddp", "stride by place, cropped", 2),
    ("ddp", "sampler of its own", 4),
    ("fsdp2", "shuffled alike", 2),
    ("ddp", "cropped", 4),
    ("ddp", "cropped by its own", 2),
}


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(("strategy", "kind", "world"), some_or_all(RIGHT, SOME_RIGHT))
def test_all_else_trains_every_sample_once(ranks: Ranks, tmp_path: Path, strategy: str, kind: str, world: int) -> None:
    results = train(ranks(world), strategy, kind, tmp_path)
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert first == second, "one batch for both ranks of a group"
    for epoch in range(2):
        trained = [int(x) for group in results[::2] for batch in group[epoch] for x in batch]
        assert sorted(trained) == list(range(SAMPLES))


def test_a_sampler_of_its_own_is_dealt_out_where_ranks_have_whole_sequences(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(fit, "ddp", 1, loader_of, "sampler of its own", str(tmp_path))
    for epoch in range(2):
        trained = [int(x) for group in (first, second) for batch in group[epoch] for x in batch]
        assert sorted(trained) == list(range(SAMPLES))
    assert first[0] != first[1]


def test_a_split_that_is_drawn_in_the_hook_is_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's part is of one split, as it is where all ranks draw alike after `seed_everything`."""
    results = train(ranks(4), "ddp", "split at random", tmp_path, max_epochs=1)
    trained = [x for group in results[::2] for batch in group[0] for x in batch]
    assert len(trained) == len(set(trained)) == 12


def test_a_stream_that_can_be_read_once_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    results = train(ranks(4), "ddp", "once", tmp_path, max_epochs=1)
    assert sorted(x for group in results[::2] for batch in group[0] for x in batch) == list(range(SAMPLES))


# -- worker processes --------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
from tests.distributed.loading.users import fit, loader_of
result = fit("ddp", 2, loader_of, sys.argv[1], "", devices=2)
with open(f"{sys.argv[2]}{os.environ.get('LOCAL_RANK', '0')}", "w") as file:
    json.dump(result, file)
"""


def run_with_workers(kind: str, folder: Path) -> list[Any]:
    """What both ranks of a group come to whose loaders have workers, which the pool's processes must not have."""
    (folder / "script.py").write_text(SCRIPT)
    places = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in places}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    command = [sys.executable, str(folder / "script.py"), kind, str(folder / "result")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"result{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("files, workers", "the first data of their loaders differ"),
        ("python, workers", "orders the samples differently"),
    ],
)
def test_workers_hide_nothing(tmp_path: Path, kind: str, expected: str) -> None:
    for message in run_with_workers(kind, tmp_path):
        assert expected in message


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["stride by place, workers", "shuffled alike, workers", "cropped, workers", "cropped by its own, workers"]
)
def test_workers_train_every_sample_once(tmp_path: Path, kind: str) -> None:
    first, second = run_with_workers(kind, tmp_path)
    assert first == second
    for epoch in first:
        assert sorted(int(x) for batch in epoch for x in batch) == list(range(SAMPLES))
