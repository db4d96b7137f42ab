"""An epoch that ends on one rank while its peers go on: all are told at once, and their gradients stay right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, IterableDataset

from lightning_videoscale import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.compat.lightning.training_loop import Begun
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies.failures.epoch_ends import EpochEnds
from tests.data.training import trainer_with
from tests.strategies.failures.jobs import Job

STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}


class Rows(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(self.count, 1, 4))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("loss", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stop(pl.Callback):
    """Rank 0 has had enough after three steps, and tells nobody."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.stop)

    def stop(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.is_global_zero and trainer.global_step == 3


def train(strategy: str, folder: Path, lengths: tuple[int, int], stop: str | None = None) -> None:
    built = STRATEGIES[strategy](
        ulysses_size=1, modules=["net"], plan=SplitPlan({}, {}, {}, lambda *_: lambda: None),
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)  # trains the first epoch, and goes back
    callbacks = [finder] if stop == "learning_rate_finder" else [Stop(stop)] if stop else []
    trainer = trainer_with(
        strategy=built, devices=2, max_epochs=3, default_root_dir=folder, callbacks=callbacks,
        val_check_interval=3 if stop == "on_validation_end" else None,
    )  # fmt: skip
    loaders = [DataLoader(Rows(count), batch_size=None) for count in (lengths[dist.get_rank()], 2)]
    trainer.fit(Net(), *loaders)
    (folder / f"steps{dist.get_rank()}").write_text(str(trainer.global_step))


@pytest.mark.parametrize(
    ("strategy", "lengths", "stop"),
    [
        ("ddp", (5, 8), None),
        ("ddp", (8, 8), "on_train_batch_end"),
        ("ddp", (8, 8), "on_validation_end"),
        ("ddp", (5, 8), "learning_rate_finder"),
        pytest.param("fsdp2", (8, 5), None, marks=pytest.mark.full),
    ],
    ids=["loader", "should_stop", "in_validation", "after_learning_rate_finder", "fsdp2"],
)
def test_ranks_whose_epochs_differ_are_named_at_once(
    tmp_path: Path, strategy: str, lengths: tuple[int, int], stop: str | None
) -> None:
    job = Job(tmp_path / "logs", 2, train, strategy, tmp_path, lengths, stop)
    codes = job.wait(100)  # the timeout is 120 s
    ended = 1 if lengths[1] < lengths[0] else 0
    batches = 3 if lengths[0] == lengths[1] else min(lengths)
    assert all(codes), job.output()
    for log in job.logs:
        said = log.read_text()
        assert f"has ended on rank {ended} after {batches} batches" in said, job.output()
        assert f"rank {1 - ended} has begun another" in said, job.output()


def test_equal_epochs_go_on(tmp_path: Path) -> None:
    job = Job(tmp_path / "logs", 2, train, "ddp", tmp_path, (5, 5))
    assert job.wait(100) == [0, 0], job.output()
    assert [(tmp_path / f"steps{rank}").read_text() for rank in range(2)] == ["15", "15"]


def in_turns(*ranks: Callable[[TCPStore], None]) -> list[BaseException | None]:
    """What comes of ranks that share a store, each in a thread."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [found.exception() for found in [pool.submit(rank, store) for rank in ranks]]


def ends_of(rank: int, *begun: int) -> EpochEnds:
    return EpochEnds(rank, 2, lambda: Begun(*begun))


def test_who_does_not_come_or_has_failed_is_an_error() -> None:
    soon, late = timedelta(seconds=0.2), timedelta(seconds=60)
    [error] = in_turns(lambda store: ends_of(0, 2, 7, 21).wait_for_all(store, soon))
    assert isinstance(error, RuntimeError) and "epoch 2 has ended on rank 0 after 7" in str(error).lower()
    assert "[1]" in str(error)

    def fail(store: TCPStore) -> None:
        store.set("first_error", "")

    error, _ = in_turns(lambda store: ends_of(0, 2, 7, 21).wait_for_all(store, late), fail)
    assert isinstance(error, RuntimeError) and "failed" in str(error)


def test_a_rank_between_epochs_is_not_taken_for_one_that_goes_on() -> None:
    """There Lightning's count of the epoch is the last one's, which may have been longer."""
    looked = threading.Event()

    def come_late(store: TCPStore) -> None:
        while not store.check(["end of an epoch/0/first"]):
            pass
        ends_of(1, 1, 8, 8).look(store)
        looked.set()
        ends_of(1, 1, 2, 10).wait_for_all(store, timedelta(seconds=60))

    assert in_turns(lambda store: ends_of(0, 1, 2, 10).wait_for_all(store, timedelta(seconds=60)), come_late) == [
        None,
        None,
    ]
    assert looked.is_set()
