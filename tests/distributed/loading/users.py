"""Loaders as users write them, and a fit that says which batches it trained on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import webdataset as wds
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
    random_split,
)

from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.loading.test_read_once import Numbers, Recorder

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
    """Shuffles by a generator of its own, differently on every rank."""

    def __init__(self, kind: str) -> None:
        seed = dist.get_rank()
        numpy, python, torchs = np.random.default_rng(seed), random.Random(seed), torch.Generator().manual_seed(seed)
        self.permute: Callable[[], list[int]] = {
            "numpy": lambda: numpy.permutation(SAMPLES).tolist(),
            "python": lambda: python.sample(range(SAMPLES), SAMPLES),
            "torch": lambda: torch.randperm(SAMPLES, generator=torchs).tolist(),
        }[kind]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.permute())


class DefaultOrder(Sampler[int]):
    """Shuffles by torch's default generator, as most samplers of users do; Lightning deals it out to the ranks."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


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
        "split at random": lambda: DataLoader(random_split(numbers, [12, 4])[0], 2, shuffle=True),
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
        "sampler of its own": lambda: DataLoader(numbers, 2, sampler=DefaultOrder()),
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
