"""Runs that stop in the middle of an epoch and go on, under a real Trainer."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, VideoDataModule
from tests.data.clips import clip, write_shard, write_shards
from tests.data.training import Witness, trainer_with

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)
SAMPLES = 60

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:You requested to overfit")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES, shards=3)


class Scheduled(Witness):
    """Asks for the loader before the checkpoint's place in the epoch is known."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class SaveAfter(Callback):
    """Saves a checkpoint after a number of micro-batches of the run."""

    def __init__(self, count: int, file: Path) -> None:
        self.count, self.file = count, file

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.count -= 1
        if not self.count:
            trainer.save_checkpoint(self.file)


class FailAfter(Callback):
    """Interrupts a training once, within a micro-batch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def on_before_backward(self, *_: Any) -> None:
        self.count -= 1
        if not self.count:
            raise InterruptedError


class AccumulateLess(Callback):
    """Steps after every micro-batch, once the first step is done."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.accumulate_grad_batches = 1


class ByHand(Scheduled):
    """Makes two optimizer steps of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for _ in range(2):
            self.optimizers().step()


def fit_by_hand(data: VideoDataModule, resume: Path | None, *callbacks: Callback) -> ByHand:
    module = ByHand()
    settings = {"max_epochs": 2, "enable_checkpointing": bool(callbacks)}
    trainer_with(callbacks=[LossWeighting(), *callbacks], **settings).fit(module, data, ckpt_path=resume)
    return module


def fit(
    data: VideoDataModule, micro_batches: int = 1, resume: Path | None = None, *callbacks: Callback, **trainer: Any
) -> Scheduled:
    module = Scheduled()
    settings = {"max_epochs": 2, "accumulate_grad_batches": micro_batches}
    callbacks = (LossWeighting(), *callbacks)
    trainer_with(callbacks=list(callbacks), **(settings | trainer)).fit(module, data, ckpt_path=resume)
    return module


def ids(batches: list[list[str]]) -> list[str]:
    return sorted(itertools.chain.from_iterable(batches))


def everything(samples: int = SAMPLES) -> list[str]:
    return sorted(f"{i % 3:03}.tar/clip{i:05}" for i in range(samples))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_as_if_it_had_not_stopped(shards: str, tmp_path: Path, num_workers: int) -> None:
    def data() -> VideoDataModule:
        return VideoDataModule(shards, budget=BUDGET, micro_batches=2, num_workers=num_workers)

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(data(), 2, None, saver, enable_checkpointing=True)
    steps = len(whole.gradients) // 2
    for step in (1, steps - 1, steps, steps + 2, 2 * steps - 1):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not resumable")
            resumed = fit(data(), 2, tmp_path / f"step={step}.ckpt")
        assert resumed.gradients == whole.gradients[step:]
        epoch, within = divmod(step, steps)
        assert resumed.batches[1] == whole.batches[1][2 * within * (epoch == 1) :]
        assert resumed.batches.get(0, []) == (whole.batches[0][2 * within :] if epoch == 0 else [])
        assert resumed.estimate == whole.estimate == 2 * steps


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_what_is_left_of_an_epoch_is_planned_with_new_settings(
    shards: str, tmp_path: Path, before: int, after: int
) -> None:
    first = VideoDataModule(shards, budget=BUDGET, micro_batches=before, val_shards=shards)
    stopped = fit(first, before, None, SaveAfter(2 * before, tmp_path / "two.ckpt"))
    done = stopped.batches[0][: 2 * before]

    larger = BucketBudget(m_mem=320, m_comp=320 * 80)
    second = VideoDataModule(shards, None, "dual_constraint", larger, micro_batches=after, val_shards=shards)
    resumed = fit(second, after, tmp_path / "two.ckpt", max_epochs=4)
    assert ids(done + resumed.batches[0]) == everything()
    assert [ids(resumed.batches[epoch]) for epoch in (1, 2, 3)] == [everything()] * 3
    assert len(resumed.validated) == 4, "validated after every epoch, of whatever length"
    assert len(resumed.batches[0]) % after == 0
    assert len(resumed.gradients) * after == sum(map(len, resumed.batches.values())), "steps are those of the plan"


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_checkpoint_on_the_last_step_of_an_epoch_is_followed_by_the_next(
    shards: str, tmp_path: Path, micro_batches: int
) -> None:
    resume: Path | None = None
    for epoch, tokens in enumerate((160, 80, 320, 320)):
        saver = ModelCheckpoint(tmp_path / str(epoch), every_n_train_steps=1)  # before the epoch ends for Lightning
        data = VideoDataModule(shards, budget=BucketBudget(tokens, tokens * 80), micro_batches=micro_batches)
        run = fit(data, micro_batches, resume, saver, max_epochs=epoch + 1, enable_checkpointing=True)
        assert run.batches.keys() == {epoch} and ids(run.batches[epoch]) == everything()
        assert len(run.gradients) * micro_batches == len(run.batches[epoch]), "every step holds all micro-batches"
        resume = Path(saver.best_model_path)


def test_a_trainer_that_fits_again_goes_on_where_an_exception_stopped_it(shards: str) -> None:
    data, module = VideoDataModule(shards, budget=BUDGET, micro_batches=2), Scheduled()
    fails = FailAfter(5)
    trainer = trainer_with(max_epochs=2, accumulate_grad_batches=2, callbacks=[LossWeighting(), fails])
    with pytest.raises(InterruptedError):
        trainer.fit(module, data)
    del module.batches[0][4:]  # the gradients of half a step are lost
    trainer.fit(module, data)
    assert {epoch: ids(batches) for epoch, batches in module.batches.items()} == {0: everything(), 1: everything()}


def test_manual_optimization_goes_on_after_any_batch(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards, budget=BUDGET)
    whole = fit_by_hand(data, None, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1))
    length = len(whole.batches[0])
    for batches in (1, length - 1, length, length + 1):
        resumed = fit_by_hand(VideoDataModule(shards, budget=BUDGET), tmp_path / f"step={2 * batches}.ckpt")
        assert resumed.batches.get(0, []) == whole.batches[0][batches:]
        assert resumed.batches[1] == whole.batches[1][max(0, batches - length) :]


def test_counts_that_differ_are_an_error(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards, budget=BUDGET, micro_batches=2)
    with pytest.raises(RuntimeError, match=r"Epoch 0 .*micro-batch 0 .*2 optimizer steps of 2"):
        fit(data, 2, None, AccumulateLess(), SaveAfter(3, tmp_path / "three.ckpt"))


def test_gradients_that_a_checkpoint_does_not_hold_are_computed_again(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards, budget=BUDGET, micro_batches=3)
    whole = fit(data, 3, None, SaveAfter(8, tmp_path / "within.ckpt"), max_epochs=1)
    resumed = fit(VideoDataModule(shards, budget=BUDGET, micro_batches=3), 3, tmp_path / "within.ckpt", max_epochs=1)
    assert resumed.batches[0] == whole.batches[0][6:]
    assert resumed.gradients == whole.gradients[2:]


def test_other_shards_are_refused_and_named(shards: str, tmp_path: Path) -> None:
    fit(VideoDataModule(shards, budget=BUDGET), 1, None, SaveAfter(3, tmp_path / "three.ckpt"))
    write_shard(tmp_path / "train" / "001.tar", [clip(i) for i in range(5)])
    (tmp_path / "train" / "002.tar").rename(tmp_path / "train" / "other.tar")
    with pytest.raises(ValueError, match=r"1 gone: 002.tar; 1 new: other.tar; 1 changed: 001.tar"):
        fit(VideoDataModule(str(tmp_path / "train" / "*.tar"), budget=BUDGET), 1, tmp_path / "three.ckpt")


def test_a_limited_epoch_is_followed_by_the_next(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards, budget=BUDGET)
    whole = fit(data, 1, None, SaveAfter(5, tmp_path / "five.ckpt"), limit_train_batches=3, max_epochs=3)
    resumed = fit(
        VideoDataModule(shards, budget=BUDGET), 1, tmp_path / "five.ckpt", limit_train_batches=3, max_epochs=3
    )
    assert resumed.batches == {1: whole.batches[1][2:], 2: whole.batches[2]}


def test_overfitting_goes_on_with_the_same_batches(shards: str, tmp_path: Path) -> None:
    settings = {"overfit_batches": 3, "max_epochs": 3}
    whole = fit(VideoDataModule(shards, budget=BUDGET), 1, None, SaveAfter(6, tmp_path / "six.ckpt"), **settings)
    resumed = fit(VideoDataModule(shards, budget=BUDGET), 1, tmp_path / "six.ckpt", **settings)
    assert whole.batches[0] == whole.batches[1] == resumed.batches[2]


def test_datasets_are_mixed_by_weight_over_epochs_and_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = write_shard(tmp_path / "few.tar", [clip(i) for i in range(10)])
    many = write_shard(tmp_path / "many.tar", [clip(i) for i in range(10, 50)])

    def data() -> VideoDataModule:
        return VideoDataModule({str(few): 1.0, str(many): 1.0}, budget=BUDGET)

    with caplog.at_level("INFO"):
        whole = fit(data(), 1, None, SaveAfter(4, tmp_path / "four.ckpt"), max_epochs=4)
    assert f"Epoch 2 begins; of each dataset was drawn before: {few} 5.00 times, {many} 1.25 times." in caplog.messages
    drawn = [ids(whole.batches[epoch]) for epoch in range(4)]
    assert [sum(name.startswith("few") for name in names) for names in drawn] == [25] * 4
    seen = list(itertools.chain.from_iterable(drawn))
    assert {seen.count(f"few.tar/clip{i:05}") for i in range(10)} == {10}
    assert {seen.count(f"many.tar/clip{i:05}") for i in range(10, 50)} <= {2, 3}
    resumed_data = data()
    resumed = fit(resumed_data, 1, tmp_path / "four.ckpt", max_epochs=4)
    assert resumed.batches[0] == whole.batches[0][4:] and resumed.batches[3] == whole.batches[3]
    assert resumed_data.passes() == {str(few): 7.5, str(many): 75 / 40}


@pytest.mark.parametrize("epochs", [5, -1])
def test_the_rest_of_an_epoch_that_max_steps_cut_short_comes_next(shards: str, tmp_path: Path, epochs: int) -> None:
    seen: list[str] = []
    resume: Path | None = None
    for steps in (2, 5, 30):  # Lightning's own checkpoints, which count the epoch as complete
        saver = ModelCheckpoint(tmp_path / str(steps))
        settings = {"max_epochs": epochs, "max_steps": steps, "enable_checkpointing": True}
        run = fit(VideoDataModule(shards, budget=BUDGET), 1, resume, saver, **settings)
        seen += itertools.chain.from_iterable(itertools.chain.from_iterable(run.batches.values()))
        resume = Path(saver.best_model_path)
    assert [sorted(seen[i : i + SAMPLES]) for i in (0, SAMPLES)] == [everything()] * 2


def test_an_epoch_that_is_limited_to_some_batches_has_no_rest(shards: str, tmp_path: Path) -> None:
    limited = {"limit_train_batches": 4, "max_epochs": 3}
    whole = fit(VideoDataModule(shards, budget=BUDGET), **limited)
    saver = ModelCheckpoint(tmp_path)
    fit(
        VideoDataModule(shards, budget=BUDGET), 1, None, saver, enable_checkpointing=True, **limited | {"max_epochs": 1}
    )
    resumed = fit(VideoDataModule(shards, budget=BUDGET), 1, Path(saver.best_model_path), **limited)
    assert resumed.batches == {epoch: whole.batches[epoch] for epoch in (1, 2)}


def test_a_run_after_a_resumed_one_begins_at_the_beginning(shards: str, tmp_path: Path) -> None:
    fit(VideoDataModule(shards, budget=BUDGET), 1, None, SaveAfter(3, tmp_path / "three.ckpt"))
    data = VideoDataModule(shards, budget=BUDGET)
    fit(data, 1, tmp_path / "three.ckpt")
    assert fit(data).batches == fit(VideoDataModule(shards, budget=BUDGET)).batches


class FailsEarly(Callback):
    """Fails once the checkpoint is loaded, and before there is a loader."""

    def on_fit_start(self, *_: Any) -> None:
        raise InterruptedError


def test_a_run_after_one_that_failed_to_resume_begins_at_the_beginning(shards: str, tmp_path: Path) -> None:
    fit(VideoDataModule(shards, budget=BUDGET), 1, None, SaveAfter(3, tmp_path / "three.ckpt"))
    data = VideoDataModule(shards, budget=BUDGET)
    with pytest.raises(InterruptedError):
        trainer_with(callbacks=[FailsEarly()]).fit(Witness(), data, ckpt_path=tmp_path / "three.ckpt")
    again = Witness()
    trainer_with().fit(again, data)
    assert ids(again.batches[0]) == everything()


def test_a_trainer_that_fits_again_takes_what_max_steps_left_of_the_epoch(shards: str) -> None:
    data, module = VideoDataModule(shards, budget=BUDGET, micro_batches=2), Scheduled()
    trainer = trainer_with(max_epochs=2, max_steps=2, accumulate_grad_batches=2, callbacks=[LossWeighting()])
    trainer.fit(module, data)
    assert module.batches.keys() == {0} and len(module.batches[0]) == 4
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(module, data)
    assert module.batches.keys() == {0, 1} and ids(module.batches[0] + module.batches[1]) == everything()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    assert ids(module.batches[2]) == everything()


def test_a_module_that_has_trained_resumes_as_a_new_one_does(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards, budget=BUDGET)
    whole = fit(data, 1, None, SaveAfter(3, tmp_path / "three.ckpt"))
    resumed = fit(data, 1, tmp_path / "three.ckpt")
    assert resumed.batches == {0: whole.batches[0][3:], 1: whole.batches[1]}


class Searched(Witness):
    """Has a learning rate that can be searched for."""

    lr = 1e-5

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("steps", [5, 50])
def test_a_run_after_a_search_for_the_learning_rate_begins_at_the_beginning(
    shards: str, tmp_path: Path, steps: int
) -> None:
    plain, module, data = (
        fit(VideoDataModule(shards, budget=BUDGET)),
        Searched(),
        VideoDataModule(shards, budget=BUDGET),
    )
    trainer = trainer_with(max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True)
    Tuner(trainer).lr_find(module, datamodule=data, num_training=steps, early_stop_threshold=None)
    assert sum(map(len, module.batches.values())) == min(steps, sum(map(len, plain.batches.values())))
    module.batches.clear()
    trainer.fit(module, data)
    assert module.batches == plain.batches


class SearchesAtEpoch(LearningRateFinder):
    """Looks for a learning rate at the beginning of an epoch, as in Lightning's documentation of its base."""

    def __init__(self, epoch: int) -> None:
        super().__init__(num_training_steps=5, early_stop_threshold=None)
        self._epoch = epoch

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epoch < 0:
            self._search(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self._epoch:
            self._search(trainer, pl_module)

    def _search(self, trainer: pl.Trainer, module: Any) -> None:
        trained = {epoch: list(batches) for epoch, batches in module.batches.items()}
        self.lr_find(trainer, module)
        assert module.batches != trained
        module.batches = trained


@pytest.mark.parametrize("epoch", [-1, 0, 1])
@pytest.mark.parametrize("window", [None, 25])
def test_a_search_at_the_beginning_of_any_epoch_takes_no_samples(
    shards: str, tmp_path: Path, epoch: int, window: int | None
) -> None:
    plain, module = Searched(), Searched()
    for witness, searches in ((plain, []), (module, [SearchesAtEpoch(epoch)])):
        trainer = trainer_with(max_epochs=3, default_root_dir=tmp_path, callbacks=searches)
        trainer.fit(witness, VideoDataModule(shards, budget=BUDGET, window=window))
    assert module.batches == plain.batches


def test_validating_a_checkpoint_is_no_place_to_train_from(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards, budget=BUDGET, val_shards=shards)
    whole = fit(data, 1, None, SaveAfter(3, tmp_path / "three.ckpt"), max_epochs=1)
    data = VideoDataModule(shards, budget=BUDGET, val_shards=shards)
    trainer_with().validate(Witness(), data, ckpt_path=tmp_path / "three.ckpt", verbose=False)
    assert fit(data, max_epochs=1).batches == whole.batches


def trained_before_shards_were_written_again(
    folder: Path,
) -> tuple[pl.Trainer, pl.LightningModule, VideoDataModule]:
    """Two steps of an epoch of nine clips, whose shard then has four others."""
    shard = write_shard(folder / "000.tar", [clip(i) for i in range(9)])
    data, module = VideoDataModule(str(shard), budget=BUDGET), Scheduled()
    trainer = trainer_with(max_epochs=2, max_steps=2, callbacks=[LossWeighting()])
    trainer.fit(module, data)
    write_shard(shard, [clip(i) for i in range(20, 24)])
    return trainer, module, data


def test_a_fit_reads_shards_that_were_written_again_as_they_are_now(tmp_path: Path) -> None:
    _, _, data = trained_before_shards_were_written_again(tmp_path)
    assert ids(fit(data, max_epochs=1).batches[0]) == [f"000.tar/clip{i:05}" for i in range(20, 24)]


def test_the_rest_of_an_epoch_is_refused_once_shards_were_written_again(tmp_path: Path) -> None:
    trainer, module, data = trained_before_shards_were_written_again(tmp_path)
    trainer.fit_loop.epoch_loop.max_steps = -1
    with pytest.raises(ValueError, match=r"1 changed: 000.tar"):
        trainer.fit(module, data)
