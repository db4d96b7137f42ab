"""The plan and the reader behind loaders that are not ours: torch's DataLoader, webdataset's WebLoader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import webdataset as wds
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, BatchMeta, VideoDataModule
from lightning_videoscale.data.loading.loader import PlannedLoader
from tests.data.clips import write_shards
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)

Make = Callable[..., Iterable[Batch]]


def _planned(folder: Path) -> PlannedLoader:
    data = VideoDataModule(write_shards(folder, 50), budget=BUDGET)
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()


@pytest.mark.parametrize("make", [DataLoader, wds.WebLoader], ids=["DataLoader", "WebLoader"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_loader_reads_the_planned_batches(tmp_path: Path, make: Make, num_workers: int) -> None:
    ours = _planned(tmp_path)
    theirs = make(ours.reader, batch_size=None, sampler=ours.sampler, num_workers=num_workers)
    for epoch in (0, 1):
        ours.sampler.set_epoch(epoch)
        batches = list(theirs)
        ours.sampler.set_epoch(epoch)
        for batch, twin in zip(batches, ours, strict=True):
            assert type(batch["meta"]) is BatchMeta and batch["meta"] == twin["meta"]
            assert batch["sample_ids"] == twin["sample_ids"] and batch["caption"] == twin["caption"]
            assert torch.equal(batch["latents"], twin["latents"])


def test_a_pipeline_behind_a_web_loader_trains_under_a_trainer(tmp_path: Path) -> None:
    ours = _planned(tmp_path)
    pipeline = wds.WebLoader(ours.reader, batch_size=None, sampler=ours.sampler)
    pipeline = pipeline.map(lambda batch: batch | {"latents": batch["latents"] * 2})
    module, doubled = Witness(), Witness()
    trainer_with(limit_val_batches=0).fit(module, ours)
    trainer_with(limit_val_batches=0).fit(doubled, pipeline)
    assert doubled.batches == module.batches and len(module.batches[0]) == len(ours)


class Own(VideoDataModule):
    def train_dataloader(self) -> Any:
        ours = super().train_dataloader()
        return DataLoader(ours.reader, batch_size=None, sampler=ours.sampler)


def _fit(kind: type[VideoDataModule], shards: str) -> dict[int, list[list[str]]]:
    module = Witness()
    trainer_with(strategy="ddp", devices=2, max_epochs=2).fit(module, kind(shards, budget=BUDGET))
    return module.batches


def test_each_rank_reads_its_own_batches_by_a_loader_of_ones_own(
    tmp_path: Path, ranks: Callable[[int], ProcessPool]
) -> None:
    shards = write_shards(tmp_path, 47)
    first, second = ranks(2).run(_fit, Own, shards)
    assert [first, second] == ranks(2).run(_fit, VideoDataModule, shards)
    assert len({name for batches in (first, second) for ids in batches[1] for name in ids}) == 47


class Piped(VideoDataModule):
    def train_dataloader(self) -> Any:
        ours = super().train_dataloader()
        return wds.WebLoader(ours.reader, batch_size=None, sampler=ours.sampler)


def test_a_loader_that_hides_the_sampler_cannot_be_saved(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1)
    data = Piped(write_shards(tmp_path, 10), budget=BUDGET)
    with pytest.raises(RuntimeError, match=r"attribute `sampler`"):
        trainer_with(limit_val_batches=0, enable_checkpointing=True, callbacks=[saver]).fit(Witness(), data)


class Holding(pl.LightningDataModule):
    """Two datasets a step, each by a DataModule of its own."""

    def __init__(self, shards: str, with_states: bool, windows: tuple[int | None, int | None] = (None, None)) -> None:
        super().__init__()
        self.parts = {
            name: VideoDataModule(shards, budget=BUDGET, seed=seed, window=windows[seed])
            for seed, name in enumerate("ab")
        }
        self.with_states = with_states

    def prepare_data(self) -> None:
        for data in self.parts.values():
            data.prepare_data()

    def setup(self, stage: str) -> None:
        for data in self.parts.values():
            data.trainer = self.trainer
            data.setup(stage)

    def train_dataloader(self) -> Any:
        return {name: data.train_dataloader() for name, data in self.parts.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: data.state_dict() for name, data in self.parts.items()} if self.with_states else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, data in self.parts.items():
            data.trainer = self.trainer
            data.load_state_dict(state_dict[name])


class OfBoth(Witness):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(super(OfBoth, self).training_step(part, batch_idx) for part in batch.values())


@pytest.mark.parametrize(("with_states", "step"), [(True, 1), (False, 1), (False, -1)])
def test_data_modules_within_another_go_on_by_their_states(tmp_path: Path, with_states: bool, step: int) -> None:
    shards, first, second = write_shards(tmp_path, 50), OfBoth(), OfBoth()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=step if step > 0 else None, filename="{step}", save_top_k=-1)
    trainer_with(callbacks=[saver], enable_checkpointing=True).fit(first, Holding(shards, with_states))
    saved = min(tmp_path.glob("*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    lost = not with_states and step == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(max_epochs=2).fit(second, Holding(shards, with_states), ckpt_path=saved)
    assert any("within epoch 0 and no state" in str(warning.message) for warning in caught) is lost
    if with_states:
        assert second.batches[0] == first.batches[0][2:]


def test_windows_of_two_data_modules_are_followed_to_their_ends(tmp_path: Path) -> None:
    module = OfBoth()
    trainer_with(max_epochs=2).fit(module, Holding(write_shards(tmp_path, 50), with_states=True, windows=(12, 25)))
    for batches in module.batches.values():
        assert all(len({name for ids in part for name in ids}) == 50 for part in (batches[::2], batches[1::2]))


class WithState(VideoDataModule):
    """Keeps something of its own beside the state of the epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": 1, "videos": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["videos"])


def test_a_subclass_may_keep_the_state_within_its_own(tmp_path: Path) -> None:
    def data() -> VideoDataModule:
        return WithState(shards, budget=BUDGET)

    shards, first, second = write_shards(tmp_path, 50), Witness(), Witness()
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = trainer_with(max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(first, (whole := data()))
    trainer_with(max_epochs=2).fit(second, data(), ckpt_path=tmp_path / "step=4.ckpt")
    assert second.batches == {0: first.batches[0][4:], 1: first.batches[1]}
    trainer.fit_loop.max_epochs = 3
    trainer.fit(first, whole)
    assert len({name for ids in first.batches[2] for name in ids}) == 50


class BesideImages(VideoDataModule):
    """Every step has a number beside its clips, from another loader."""

    numbers = 40

    def train_dataloader(self) -> Any:
        return {"clips": super().train_dataloader(), "numbers": DataLoader(range(self.numbers))}


class OfClips(Witness):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.numbers.setdefault(self.current_epoch, []).append(int(batch["numbers"]))
        return super().training_step(batch["clips"], batch_idx)


@pytest.mark.parametrize("settings", [{}, {"window": 20}])
def test_a_longer_loader_beside_planned_epochs_is_read_to_its_end(tmp_path: Path, settings: dict[str, int]) -> None:
    module, validated = OfClips(), write_shards(tmp_path / "val", 4)
    data = BesideImages(write_shards(tmp_path, 50), budget=BUDGET, val_shards=validated, **settings)
    trainer_with(max_epochs=2, val_check_interval=0.5, num_sanity_val_steps=0).fit(module, data)
    assert module.numbers == {0: [*range(40)], 1: [*range(40)]} and len(module.validated) == 4
    assert all(len({name for ids in batches for name in ids}) == 50 for batches in module.batches.values())


@pytest.mark.parametrize("settings", [{}, {"window": 20}])
def test_a_run_goes_on_where_clips_are_read_again_beside_a_longer_loader(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    def data() -> VideoDataModule:
        return BesideImages(shards, budget=BUDGET, **settings)

    shards, saver = write_shards(tmp_path, 50), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=25)
    trainer_with(max_steps=25, callbacks=[saver], enable_checkpointing=True).fit(OfClips(), data())
    module = OfClips()
    trainer_with(max_epochs=2).fit(module, data(), ckpt_path=tmp_path / "step=25.ckpt")
    assert {epoch: len(numbers) for epoch, numbers in module.numbers.items()} == {0: 15, 1: 40}
    assert all(len({name for ids in batches for name in ids}) == 50 for batches in module.batches.values())
