"""Under a Trainer each micro-batch is read once per sequence-parallel group, whatever the data come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_videoscale import BucketBudget, SequenceParallelDDPStrategy, VideoDataModule
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.parallel import SplitPlan
from tests.data.clips import write_shards
from tests.distributed.loading.noting import train_with_workers
from tests.distributed.pool import ProcessPool
from tests.strategies.failures.jobs import Job

Ranks = Callable[[int], ProcessPool]


class Numbers(Dataset[Tensor]):
    """0, 1, 2, …; remembers what was read here."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count = count
        self.bad = bad
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index == self.bad:
            raise ValueError(f"clip {index} is damaged")
        self.read.append(index)
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    """As many numbers as nobody knows before; remembers what was read here."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(self.count):
            self.read.append(i)
            yield torch.tensor([float(i)])


class Recorder(pl.LightningModule):
    """Notes its batches and random numbers by stage and epoch; computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: dict[tuple[str, int], list[Any]] = {}

    def note(self, batch: Any) -> Tensor:
        x: Tensor = batch["latents"].mean(dim=(1, 2, 3, 4)) if isinstance(batch, dict) and "latents" in batch else batch
        if isinstance(x, dict):
            x = torch.cat(list(x.values()))
        stage = (self.trainer.state.stage.value, self.trainer.current_epoch)
        self.seen.setdefault(stage, []).append((x.flatten().tolist(), torch.rand(()).item()))
        return self.net(x.view(-1, 1)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.note(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def batches(self, stage: str, epoch: int = 0) -> list[list[float]]:
        return [batch for batch, _ in self.seen[stage, epoch]]


def trainer(sp: int = 2, **kwargs: Any) -> pl.Trainer:
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    strategy = SequenceParallelDDPStrategy(ulysses_size=sp, modules=["net"], plan=plan)
    defaults = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet = {"enable_model_summary": False, "num_sanity_val_steps": 0}
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), **(defaults | quiet | kwargs)
    )


# -- our DataModule ------------------------------------------------------------------------------------------------


def fit_shards(shards: str, sp: int) -> Any:
    read: list[list[int]] = []
    original = MicroBatchReader.read

    def counting(self: MicroBatchReader, part: Any) -> Any:
        read.append(list(part.micro_batch.samples))
        return original(self, part)

    module = Recorder()
    data = VideoDataModule(shards, budget=BucketBudget(160, 160 * 80), val_shards=shards, micro_batches=2)
    with patch.object(MicroBatchReader, "read", counting):
        trainer(sp, max_epochs=2, accumulate_grad_batches=2).fit(module, data)
    return module.seen, read


@pytest.mark.parametrize(("world", "sp"), [(4, 2), (2, 2)])
def test_shards_are_read_in_turn_and_every_sample_once(tmp_path: Path, ranks: Ranks, world: int, sp: int) -> None:
    samples = 47
    results = ranks(world).run(fit_shards, write_shards(tmp_path, samples), sp)
    groups = [results[i : i + sp] for i in range(0, world, sp)]
    for group in groups:
        assert all(seen == group[0][0] for seen, _ in group), "one batch, one noise"
        passes = [len(batches) for batches in group[0][0].values()]
        read = [len(reads) for _, reads in group]
        assert sum(read) == sum(passes)
        assert max(read) - min(read) <= len(passes)
    for stage, epoch in groups[0][0][0]:
        batches = [[x for x, _ in group[0][0][stage, epoch]] for group in groups]
        assert len({str(b) for b in batches}) == len(groups), "other batches on other data-parallel ranks"
        seen = [round(value) for of_group in batches for batch in of_group for value in batch]
        assert set(seen) == set(range(samples))
        assert len(seen) - samples <= world, "all once, except for what fills the last step"
    assert groups[0][0][0]["train", 0] != groups[0][0][0]["train", 1]


# -- users' own data -----------------------------------------------------------------------------------------------


def fit_numbers() -> Any:
    module, train, val = Recorder(), Numbers(20), Numbers(6)
    runner = trainer(max_epochs=2)
    runner.fit(module, DataLoader(train, batch_size=2, shuffle=True), DataLoader(val, batch_size=2))
    assert runner.estimated_stepping_batches == 10
    return module.seen, train.read, len(val.read)


def test_a_map_style_dataset_is_read_in_turn(ranks: Ranks) -> None:
    results = ranks(4).run(fit_numbers)
    assert results[0][0] == results[1][0] and results[2][0] == results[3][0]
    for epoch in (0, 1):
        seen = [x for result in (results[0], results[2]) for batch, _ in result[0]["train", epoch] for x in batch]
        assert sorted(seen) == list(range(20))
    assert results[0][0]["train", 0] != results[0][0]["train", 1]
    # Five micro-batches of two per data-parallel rank and epoch: three are one rank's turns, two its peer's. Before the
    # first of them, both ranks have read its first sample, to compare.
    assert [seen["train", 0][0][0][0] for seen, *_ in results] == [read[0] for _, read, _ in results]
    assert [len(read) for _, read, _ in results] == [1 + 12, 1 + 8, 1 + 12, 1 + 8]
    assert sorted(index for _, read, _ in results for index in read[1:]) == sorted(2 * list(range(20)))
    assert [count for *_, count in results] == [1 + 4, 1 + 2, 1 + 4, 1 + 2]


def fit_stream() -> Any:
    module, train, val = Recorder(), Stream(5), Stream(3)
    trainer(max_epochs=2).fit(module, DataLoader(train, batch_size=2), DataLoader(val, batch_size=1))
    return module.seen, train.read, val.read


def test_a_stream_of_unknown_length_is_read_by_one_rank_of_the_group(ranks: Ranks) -> None:
    results = ranks(4).run(fit_stream)
    assert results[0][0] == results[1][0] and results[2][0] == results[3][0]
    assert [batch for batch, _ in results[0][0]["train", 1]] == [[0, 1], [2, 3], [4]]
    assert [batch for batch, _ in results[0][0]["validate", 1]] == [[0], [1], [2]]
    # All read the first batch, to compare.
    assert [len(read) for _, read, _ in results] == [10, 2, 10, 2]
    assert [len(read) for *_, read in results] == [6, 1, 6, 1]


class WithHooks(Recorder):
    """Augments in hooks, with generators that are seeded alike and with one that is not."""

    own = np.random.default_rng()

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        assert batch.device.type == "cpu"
        return torch.cat([batch, torch.rand(1, 1), torch.rand(1, 1) + dist.get_rank()])

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return torch.cat([batch, torch.rand(1, 1), torch.tensor([[float(np.random.rand())], [self.own.random()]])])


def fit_with_hooks() -> Any:
    module = WithHooks()
    trainer().fit(module, DataLoader(Numbers(8), batch_size=1))
    return module.seen


def test_hooks_that_draw_random_numbers_leave_one_batch(ranks: Ranks) -> None:
    results = ranks(4).run(fit_with_hooks)
    assert results[0] == results[1] and results[2] == results[3]
    drawn = [value for result in (results[0], results[2]) for batch, _ in result["train", 0] for value in batch[1:]]
    assert len(drawn) == len(set(drawn)) == 8 * 5


class TakesTheIterator(Recorder):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return self.note(batch)


def fit_dataloader_iter() -> Any:
    module = TakesTheIterator()
    trainer().fit(module, DataLoader(Numbers(12), batch_size=1))
    return module.seen


def test_a_training_step_that_takes_the_iterator_draws_the_same_numbers(ranks: Ranks) -> None:
    results = ranks(4).run(fit_dataloader_iter)
    assert results[0] == results[1] and results[2] == results[3]
    drawn = [value for result in (results[0], results[2]) for _, value in result["train", 0]]
    assert len(drawn) == len(set(drawn)) == 12


# -- what else Trainers do -----------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, *args: Any) -> None:
        self.indices.append(args[3])


def run_variants() -> dict[str, Any]:
    def fit(loader: Any, **kwargs: Any) -> list[list[float]]:
        module = Recorder()
        trainer(**kwargs).fit(module, loader)
        return [batch for stage, epoch in module.seen for batch in module.batches(stage, epoch)]

    found: dict[str, Any] = {}
    found["stopped"] = fit(DataLoader(Numbers(40), batch_size=1), max_steps=3)
    found["limited"] = fit(DataLoader(Stream(9), batch_size=1), max_epochs=2, limit_train_batches=2)
    found["fast_dev_run"] = fit(DataLoader(Numbers(40), batch_size=1), fast_dev_run=True)
    found["overfit"] = fit(DataLoader(Numbers(40), batch_size=1, shuffle=True), max_epochs=2, overfit_batches=3)
    found["reloaded"] = fit(DataLoader(Numbers(8), batch_size=2), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    several = {"a": DataLoader(Numbers(4), batch_size=1), "b": DataLoader(Stream(3), batch_size=1)}
    found["several"] = fit(several)

    module, writer, dataset = Recorder(), Writer(), Numbers(10)
    runner = trainer(callbacks=[writer], max_steps=1)
    loaders = [DataLoader(dataset, batch_size=2), DataLoader(Numbers(3), batch_size=1)]
    runner.predict(module, loaders)
    found["indices"], found["read"] = writer.indices, len(dataset.read)
    found["batches"] = module.batches("predict")
    return found


def test_loops_and_limits_of_the_trainer(ranks: Ranks) -> None:
    results = ranks(4).run(run_variants)
    first, peer, third, _ = results
    assert {**first, "read": 0} == {**peer, "read": 0}
    assert len(first["stopped"]) == 3
    assert first["limited"] == [[0], [1], [0], [1]]
    assert len(first["fast_dev_run"]) == 1
    assert first["overfit"][:3] == first["overfit"][3:] == [[0], [2], [4]]
    assert first["overfit"][:3] != third["overfit"][:3] == [[1], [3], [5]]
    assert sorted(x for batch in first["reloaded"][:2] + third["reloaded"][:2] for x in batch) == list(range(8))
    assert [len(batch) for batch in first["several"]] == [2] * 3
    assert [batch[1] for batch in first["several"]] == [0, 1, 2]
    # Predicting neither drops nor repeats a sample, and says which ones a batch holds.
    assert first["indices"] == [[0, 2], [4, 6], [8], [0], [2]] and third["indices"] == [[1, 3], [5, 7], [9], [1]]
    assert first["batches"] == first["indices"]
    assert [result["read"] for result in results] == [1 + 3, 1 + 2, 1 + 3, 1 + 2]


class Drawing(Dataset[Tensor]):
    """Each sample is a random number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def of_two_loaders() -> list[list[float]]:
    module = Recorder()
    loaders = {name: DataLoader(Drawing(count), batch_size=1) for name, count in (("short", 2), ("long", 4))}
    trainer(max_epochs=2).fit(module, loaders)
    return [*map(list, zip(*module.batches("train", 0), *module.batches("train", 1), strict=True))]


def test_several_loaders_draw_numbers_of_their_own_in_each_pass(ranks: Ranks) -> None:
    first, second = ranks(2).run(of_two_loaders)
    assert first == second
    assert [len(drawn) for drawn in first] == [8, 8]  # the short one is begun again in each of two epochs
    assert len({number for drawn in first for number in drawn}) == 16


def fit_damaged() -> Any:
    # Shuffling off, so that sample i is read by data-parallel rank i % 2, and both fail in the same step.
    module, dataset = Recorder(), Numbers(24)
    dataset.bad = 12 + dist.get_rank() // 2
    loader = DataLoader(dataset, batch_size=2)
    try:
        trainer(overfit_batches=1.0).fit(module, loader)
    except ValueError as error:
        return str(error), error.__notes__, len(module.seen["train", 0])
    raise AssertionError("no error")


def test_an_error_while_reading_names_the_reader_on_all_ranks_of_its_group(ranks: Ranks) -> None:
    pool = ranks(4)
    try:
        results = pool.run(fit_damaged)
    finally:
        pool.stop()  # an error in the middle of a fit leaves the processes out of step
    for rank, (message, notes, steps) in enumerate(results):
        group = rank // 2
        assert message == f"clip {12 + group} is damaged" and steps == 3
        assert notes[0] == f"Rank {2 * group + 1} was reading micro-batch 3 for ranks {[2 * group, 2 * group + 1]}."


# -- worker processes ----------------------------------------------------------------------------------------------


def test_worker_processes_read_ahead_each_what_is_its_ranks_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = Job(tmp_path / "printed", 2, train_with_workers, log)
    assert job.wait(150) == [0, 0], job.output()
    events: dict[tuple[str, int], list[int]] = {}
    for line in log.read_text().splitlines():
        what, rank, value = line.split()
        events.setdefault((what, int(rank)), []).append(int(value))
    assert events["epoch0", 0] == events["epoch0", 1] != events["epoch1", 0] == events["epoch1", 1]
    for rank in (0, 1):
        turns = [events["epoch0", 0][0], *events["epoch0", 0][rank::2], *events["epoch1", 0][rank::2]]
        assert sorted(events["worker", rank]) == sorted(turns)
    assert events["validated", 0] == events["validated", 1]
    assert ("main", 0) not in events and len(events["stream", 1]) <= 6, "rank 1 only looks at the stream's begin"
