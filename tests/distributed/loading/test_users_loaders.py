"""Loaders of users' own: every sample is trained once, or all ranks are told why it would not be."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import webdataset as wds
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset, get_worker_info

from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.data.clips import clip, write_shard
from tests.distributed.groups import reused_groups
from tests.distributed.pool import ProcessPool
from tests.distributed.loading.test_read_once import Numbers, Recorder

Ranks = Callable[[int], ProcessPool]
STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
SAMPLES = 16


class Strided(IterableDataset[Tensor]):
    """Every n-th number, of several workers each its part."""

    def __init__(self, rank: int, size: int, ends: tuple[int, ...] = (SAMPLES,)) -> None:
        self.part = range(rank, ends[rank % len(ends)], size)

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        part = self.part if worker is None else self.part[worker.id :: worker.num_workers]
        return (torch.tensor([float(i)]) for i in part)


class Files(Dataset[Tensor]):
    """Takes every n-th file, as its own code decides."""

    def __init__(self, rank: int, size: int) -> None:
        self.files = [f"{i}.mp4" for i in range(SAMPLES)][rank::size]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(Path(self.files[index]).stem)])


class OwnOrder(Sampler[int]):
    """Shuffles by a generator of its own."""

    def __init__(self, kind: str) -> None:
        numpy, python, torchs = np.random.default_rng(), random.Random(), torch.Generator()
        torchs.seed()
        self.permute: Callable[[], list[int]] = {
            "numpy": lambda: numpy.permutation(SAMPLES).tolist(),
            "python": lambda: python.sample(range(SAMPLES), SAMPLES),
            "torch": lambda: torch.randperm(SAMPLES, generator=torchs).tolist(),
        }[kind]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.permute())


class Cropped(Numbers):
    """Adds less than a half, drawn from the default generators or from one that nobody seeded."""

    def __init__(self, count: int, own: bool = False) -> None:
        super().__init__(count)
        self.draw = np.random.default_rng().random if own else random.random

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.draw() / 2


class CroppedStream(Strided):
    def __iter__(self) -> Iterator[Tensor]:
        return (x + random.Random().random() / 2 for x in super().__iter__())


def loader_of(kind: str, strategy: Any, shards: str) -> Any:
    """A loader as a user writes it in ``train_dataloader``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = strategy.data_parallel_rank, strategy.data_parallel_size

    def web(nodesplitter: Any, shuffle: int) -> Any:
        samples = wds.WebDataset(shards, shardshuffle=shuffle, nodesplitter=nodesplitter).shuffle(shuffle).decode()
        numbers = samples.map(lambda sample: {"latents": torch.tensor(sample["latents.npy"]).float()})
        return wds.WebLoader(numbers, batch_size=2)

    numbers = Numbers(SAMPLES)
    loaders: dict[str, Callable[[], Any]] = {
        "distributed sampler": lambda: DataLoader(numbers, 2, sampler=DistributedSampler(numbers)),
        "sampler of the world": lambda: DataLoader(numbers, 2, sampler=DistributedSampler(numbers, world, place[0])),
        "split by node": lambda: web(wds.split_by_node, 0),
        "shuffled and split by node": lambda: web(wds.split_by_node, 4),
        "stride": lambda: DataLoader(Strided(rank, world), 2),
        "stride, workers": lambda: DataLoader(Strided(rank, world), 2, num_workers=2, persistent_workers=True),
        "subset": lambda: DataLoader(Subset(numbers, range(rank, SAMPLES, world)), 2),
        "subset, cropped": lambda: DataLoader(Subset(Cropped(SAMPLES, own=True), range(rank, SAMPLES, world)), 2),
        "files": lambda: DataLoader(Files(rank, world), 2, shuffle=True),
        "files, workers": lambda: DataLoader(Files(rank, world), 2, shuffle=True, num_workers=2),
        "numpy": lambda: DataLoader(numbers, 2, sampler=OwnOrder("numpy")),
        "torch": lambda: DataLoader(numbers, 2, sampler=OwnOrder("torch")),
        "python": lambda: DataLoader(numbers, 2, sampler=OwnOrder("python")),
        "python, workers": lambda: DataLoader(numbers, 2, sampler=OwnOrder("python"), num_workers=2),
        "distributed sampler by place": lambda: DataLoader(numbers, 2, sampler=_by(numbers, place)),
        "split by place": lambda: web(lambda urls: itertools.islice(urls, place[0], None, place[1]), 0),
        "shuffled, split by place": lambda: web(lambda urls: itertools.islice(urls, place[0], None, place[1]), 4),
        "stride by place": lambda: DataLoader(Strided(*place), 2),
        "stride by place, workers": lambda: DataLoader(Strided(*place), 2, num_workers=2, persistent_workers=True),
        "stride by place, cropped": lambda: DataLoader(CroppedStream(*place), 2),
        "shuffled": lambda: DataLoader(numbers, 2, shuffle=True),
        "shuffled alike": lambda: _alike(numbers, 0),
        "shuffled alike, workers": lambda: _alike(numbers, 1),
        "cropped": lambda: DataLoader(Cropped(SAMPLES), 2),
        "cropped, workers": lambda: DataLoader(Cropped(SAMPLES), 2, num_workers=2, worker_init_fn=_seed_by_global_rank),
        "cropped by its own, workers": lambda: DataLoader(Cropped(SAMPLES, own=True), 2, num_workers=2),
        "cropped by its own": lambda: DataLoader(Cropped(SAMPLES, own=True), 2),
        "once": lambda: DataLoader(_Once(*place), 2),
    }
    return loaders[kind]()


def _by(numbers: Numbers, place: tuple[int, int]) -> DistributedSampler[Tensor]:
    return DistributedSampler(numbers, num_replicas=place[1], rank=place[0])


def _alike(numbers: Numbers, workers: int) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(7)  # of the sampler and of the workers' seeds
    return DataLoader(numbers, 2, shuffle=True, generator=generator, num_workers=workers)


def _seed_by_global_rank(worker: int) -> None:
    random.seed(torch.initial_seed() + 1000 * dist.get_rank() + worker)


class _Once(IterableDataset[Tensor]):
    """A stream that can be read only once."""

    def __init__(self, rank: int, size: int) -> None:
        self.rest = iter(range(rank, SAMPLES, size))

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in self.rest)


class Loading(Recorder):
    """Makes its loader in ``train_dataloader``, where the strategy knows its place."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        super().__init__()
        self.make, self.args = make, args

    def train_dataloader(self) -> Any:
        return self.make(*self.args[:1], self.trainer.strategy, *self.args[1:])


def fit(strategy: str, sp: int, make: Callable[..., Any], *args: Any, devices: int = 0, **kwargs: Any) -> Any:
    """The batches of each epoch, or what the error says."""
    module, plan = Loading(make, *args), SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    with reused_groups():
        trainer = pl.Trainer(
            strategy=STRATEGIES[strategy](ulysses_size=sp, modules=["net"], plan=plan),
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **({"max_epochs": 2, "devices": devices or dist.get_world_size()} | kwargs),
        )
        try:
            trainer.fit(module)
        except ValueError as error:
            return str(error)
    return [module.batches("train", epoch) for epoch in range(trainer.max_epochs) if ("train", epoch) in module.seen]


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
        assert f"Ranks {group} train on one batch that one of them reads for all, but " in message
        assert "shard by strategy.data_parallel_rank and strategy.data_parallel_size" in message
    assert SHARDED[kind].format(world=world) in messages[0]


SOME_ORDERED = {("ddp", "numpy", 4), ("fsdp2", "torch", 2), ("ddp", "python", 2)}


@pytest.mark.parametrize(("strategy", "kind", "world"), some_or_all(ORDERED, SOME_ORDERED))
def test_a_sampler_that_no_seed_governs_is_refused(
    ranks: Ranks, tmp_path: Path, strategy: str, kind: str, world: int
) -> None:
    for message in train(ranks(world), strategy, kind, tmp_path, use_distributed_sampler=False):
        assert "but its BatchSampler orders the samples differently on each of them, from micro-batch 0 on" in message


SOME_RIGHT = {
    ("ddp", "distributed sampler by place", 4),
    ("fsdp2", "split by place", 4),
    ("ddp", "shuffled, split by place", 4),
    ("ddp", "stride by place", 4),
    ("ddp", "stride by place, cropped", 2),
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


def test_a_stream_that_can_be_read_once_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    results = train(ranks(4), "ddp", "once", tmp_path, max_epochs=1)
    assert sorted(x for group in results[::2] for batch in group[0] for x in batch) == list(range(SAMPLES))


class Repeating(Sampler[int]):
    """Draws as it goes, from the default generator, and for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(SAMPLES)


def endless(batch_size: int, strategy: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(SAMPLES), batch_size, sampler=Repeating())


def test_a_sampler_that_draws_as_it_goes_agrees(ranks: Ranks) -> None:
    first, second = ranks(2).run(fit, "ddp", 2, endless, 2, max_steps=6, use_distributed_sampler=False)
    assert first == second and len(first[0]) == 6


# -- worker processes ----------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
from tests.distributed.loading.test_users_loaders import fit, loader_of
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


# -- ends ----------------------------------------------------------------------------------------------------------


def uneven(ends: tuple[int, int], strategy: Any) -> DataLoader[Tensor]:
    return DataLoader(Strided(strategy.data_parallel_rank, strategy.data_parallel_size, ends), 2)


class Sized:
    """Batches whose number is known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(self.length))


def uneven_sized(lengths: tuple[int, int], strategy: Any) -> Sized:
    return Sized(lengths[strategy.data_parallel_rank])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_streams_of_different_lengths_end_together(ranks: Ranks, strategy: str) -> None:
    results = ranks(4).run(fit, strategy, 2, uneven, (16, 24), max_epochs=2)
    first, second = [[0, 2], [4, 6], [8, 10], [12, 14]], [[1, 3], [5, 7], [9, 11], [13, 15]]
    assert results == [[first] * 2] * 2 + [[second] * 2] * 2


def test_data_whose_lengths_are_known_to_differ_are_refused(ranks: Ranks) -> None:
    pool = ranks(4)
    try:
        messages = pool.run(fit, "ddp", 2, uneven_sized, (6, 4))
    finally:
        pool.stop()  # an error in the middle of a fit leaves the processes out of step
    for message in messages:
        assert (
            "The loaders of data-parallel ranks [1] ended after 4 micro-batches, and those of [0] have more" in message
        )


def test_a_limit_makes_them_equal(ranks: Ranks) -> None:
    results = ranks(4).run(fit, "ddp", 2, uneven_sized, (6, 4), limit_train_batches=3)
    assert [len(epochs[1]) for epochs in results] == [3] * 4
