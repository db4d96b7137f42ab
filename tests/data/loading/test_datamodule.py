"""The DataModule under a real Trainer."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_videoscale.callbacks import LossWeighting as ApplyLossWeights
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, BatchMeta, VideoDataModule
from lightning_videoscale.data.planning import Balance, LossUnit
from tests.data.clips import clip, npy, write_shard, write_shards
from tests.data.training import Witness, trainer_with

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)
SAMPLES = 50


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES)


def _ids(batches: list[list[str]]) -> list[str]:
    return sorted(itertools.chain.from_iterable(batches))


def _all_ids(samples: int = SAMPLES) -> list[str]:
    return sorted(f"{i % 2:03}.tar/clip{i:05}" for i in range(samples))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_once_per_epoch_and_no_two_epochs_alike(shards: str, num_workers: int) -> None:
    module = Witness()
    trainer_with(max_epochs=3).fit(module, VideoDataModule(shards, budget=BUDGET, num_workers=num_workers))
    assert [_ids(module.batches[epoch]) for epoch in range(3)] == [_all_ids()] * 3
    assert module.batches[0] != module.batches[1] != module.batches[2]
    assert {len(ids) for ids in module.batches[0]} == {meta.samples for meta in module.metas}


def test_workers_change_no_batch(shards: str) -> None:
    first, second = Witness(), Witness()
    trainer_with(max_epochs=2).fit(first, VideoDataModule(shards, budget=BUDGET, num_workers=0))
    trainer_with(max_epochs=2).fit(second, VideoDataModule(shards, budget=BUDGET, num_workers=2))
    assert first.batches == second.batches
    other_seed = Witness()
    trainer_with().fit(other_seed, VideoDataModule(shards, budget=BUDGET, seed=1))
    assert other_seed.batches[0] != first.batches[0]


class Told(SingleDeviceStrategy):
    """A strategy that asks how often shapes come."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.said: list[float] = []

    def expect_shapes(self, micro_batches_per_shape: float) -> None:
        """See `topology.ExpectsShapes`."""
        self.said.append(micro_batches_per_shape)


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": 3, "max_steps": 4}])
def test_a_strategy_is_told_how_often_shapes_come(shards: str, length: dict[str, Any]) -> None:
    module, strategy = Witness(), Told()
    trainer_with(strategy=strategy, **length).fit(module, VideoDataModule(shards, budget=BUDGET))
    kinds = {meta[:5] for meta in module.metas}
    # A run that ends early has not met all shapes of its epoch.
    expected = len(module.metas) / len(kinds)
    assert strategy.said[0] <= expected if "max_steps" in length else strategy.said[0] == pytest.approx(expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_sees_the_same_batches_every_time(shards: str, tmp_path: Path, num_workers: int) -> None:
    val_shards = write_shards(tmp_path / "val", 20)
    module = Witness()
    data = VideoDataModule(shards, budget=BUDGET, val_shards=val_shards, num_workers=num_workers)
    trainer_with(max_epochs=2, num_sanity_val_steps=2).fit(module, data)
    sanity, *passes = module.validated
    assert len(passes) == 2 and passes[0] == passes[1] and sanity == passes[0][:2]
    assert _ids(passes[0]) == _all_ids(20)
    assert [_ids(module.batches[epoch]) for epoch in range(2)] == [_all_ids()] * 2


def test_without_validation_shards_nothing_is_validated(shards: str) -> None:
    class WithItsOwn(VideoDataModule):
        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Total length of")
        without, own = Witness(), Witness()
        trainer_with().fit(without, VideoDataModule(shards, budget=BUDGET))
        trainer_with().fit(own, WithItsOwn(shards, budget=BUDGET))
    assert without.validated == []
    assert _ids(own.validated[-1]) == _all_ids()
    with pytest.raises(Exception, match="val_dataloader"):
        trainer_with().validate(Witness(), VideoDataModule(shards, budget=BUDGET))


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_lightnings_switches_work(shards: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "val" / "000.tar", [clip(i) for i in range(3)])
    val = str(tmp_path / "val" / "000.tar")

    def fit(epochs: int = 3, **kwargs: Any) -> Witness:
        module = Witness()
        trainer_with(max_epochs=epochs, **kwargs).fit(module, VideoDataModule(shards, budget=BUDGET, val_shards=val))
        return module

    limited = fit(limit_train_batches=4, limit_val_batches=1)
    assert [len(limited.batches[epoch]) for epoch in range(3)] == [4, 4, 4]
    assert limited.batches[0] != limited.batches[1]
    half = fit(limit_train_batches=0.5)
    assert len(half.batches[0]) == len(fit().batches[0]) // 2
    assert len(fit(fast_dev_run=2).batches[0]) == 2
    overfit = fit(overfit_batches=3)
    assert overfit.batches[0] == overfit.batches[1] == overfit.batches[2] and len(overfit.batches[0]) == 3
    reloaded = fit(reload_dataloaders_every_n_epochs=1)
    assert reloaded.batches == fit().batches


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("switch", [{"limit_train_batches": 4}, {"fast_dev_run": 4}, {"overfit_batches": 4}])
def test_lightnings_switches_count_micro_batches(shards: str, switch: dict[str, int]) -> None:
    module = Witness()
    trainer = trainer_with(accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=2, **switch)
    trainer.fit(module, VideoDataModule(shards, budget=BUDGET, micro_batches=2, val_shards=shards))
    epochs = 1 if "fast_dev_run" in switch else 2
    assert [len(module.batches[epoch]) for epoch in range(epochs)] == [4] * epochs
    assert len(module.gradients) == trainer.global_step == 2 * epochs


def test_predictions_come_once_and_alike_every_time(shards: str) -> None:
    class Predicts(Witness):
        def predict_step(self, batch: Batch, batch_idx: int) -> list[str]:
            return batch["sample_ids"]

    def predict(**kwargs: Any) -> list[list[str]]:
        predicted: Any = trainer_with(**kwargs).predict(Predicts(), VideoDataModule(shards, predict_shards=shards))
        return predicted

    whole = predict()
    assert _ids(whole) == _all_ids() and predict() == whole
    assert predict(limit_predict_batches=3) == whole[:3]


def test_estimated_stepping_batches_is_the_number_of_steps(shards: str) -> None:
    class Scheduled(Witness):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Scheduled()
    data = VideoDataModule(shards, budget=BUDGET, micro_batches=3, num_workers=2)
    trainer = trainer_with(max_epochs=2, accumulate_grad_batches=3, callbacks=[ApplyLossWeights()])
    trainer.fit(module, data)
    assert module.estimate == trainer.global_step == len(module.gradients)
    assert [_ids(module.batches[epoch]) for epoch in range(2)] == [_all_ids()] * 2
    assert module.batches[0] != module.batches[1]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_resumes_after_an_epoch_goes_on_with_the_next(shards: str, tmp_path: Path, num_workers: int) -> None:
    class Scheduled(Witness):
        # Asks for the loader before the checkpoint's epoch is known: the plan must not be that of epoch 0.
        def configure_optimizers(self) -> torch.optim.Optimizer:
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    def fit(folder: str, checkpoint: Path | None = None) -> Witness:
        module = Scheduled()
        saver = ModelCheckpoint(dirpath=tmp_path / folder, filename="{epoch}", save_top_k=-1)
        trainer = trainer_with(max_epochs=3, enable_checkpointing=True, callbacks=[saver])
        trainer.fit(module, VideoDataModule(shards, budget=BUDGET, num_workers=num_workers), ckpt_path=checkpoint)
        return module

    whole = fit("whole")
    resumed = fit("resumed", tmp_path / "whole" / "epoch=0.ckpt")
    assert resumed.batches == {epoch: whole.batches[epoch] for epoch in (1, 2)}


@pytest.mark.parametrize("balance", ["planned", "dual_constraint", "equal_token"])
@pytest.mark.parametrize("loss_weighting", ["sample", "token"])
def test_the_gradient_is_that_of_one_big_batch(shards: str, balance: Balance, loss_weighting: LossUnit) -> None:
    module = Witness()
    data = VideoDataModule(shards, None, balance, BUDGET, micro_batches=3, loss_weighting=loss_weighting, num_workers=0)
    trainer_with(accumulate_grad_batches=3, callbacks=[ApplyLossWeights()]).fit(module, data)
    steps = [slice(i, i + 3) for i in range(0, len(module.metas), 3)]
    assert len({meta.samples for meta in module.metas}) > 2, "the batches differ in size"
    for step, gradient in zip(steps, module.gradients, strict=True):
        x, tokens = [], []
        for ids, meta in zip(module.batches[0][step], module.metas[step], strict=True):
            x += [int(name[-5:]) / 100 for name in ids]
            tokens += [float(meta.loss_weight > 0) * (meta.sequence_length if loss_weighting == "token" else 1)] * len(
                ids
            )
        expected = np.average([2 * v * (0.5 * v - 1) for v in x], weights=tokens)
        assert gradient == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_normalised_over_the_epoch_the_mean_over_steps_is_that_of_one_big_batch(
    shards: str, micro_batches: int
) -> None:
    module = Witness()
    data = VideoDataModule(shards, budget=BUDGET, micro_batches=micro_batches, loss_normalization="epoch")
    trainer_with(accumulate_grad_batches=micro_batches).fit(module, data)
    assert len({meta.samples for meta in module.metas}) > 2 and len(module.gradients) > 3
    big_batch = _slope(i / 100 for i in range(SAMPLES)) / SAMPLES
    assert np.mean(module.gradients) == pytest.approx(big_batch, rel=1e-10)


def test_micro_batches_are_those_that_the_trainer_accumulates(shards: str) -> None:
    data, module = VideoDataModule(shards, budget=BUDGET), Witness()
    trainer_with(accumulate_grad_batches=3).fit(module, data)
    assert data.planner is not None and data.planner.micro_batches == 3
    assert module.trainer.global_step * 3 == len(module.metas)
    alone = VideoDataModule(shards, budget=BUDGET)
    alone.prepare_data()
    alone.setup("fit")
    alone.train_dataloader()
    assert alone.planner is not None and alone.planner.micro_batches == 1


def test_a_wrong_number_of_micro_batches_is_an_error(shards: str) -> None:
    with pytest.raises(ValueError, match=r"4 micro-batches .*Trainer\(accumulate_grad_batches=4\)"):
        trainer_with().fit(Witness(), VideoDataModule(shards, budget=BUDGET, micro_batches=4))
    scheduler = GradientAccumulationScheduler({0: 4, 1: 2})
    trainer = trainer_with(callbacks=[scheduler, ApplyLossWeights()], max_epochs=2)
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler|4 micro-batches"):
        trainer.fit(Witness(), VideoDataModule(shards, budget=BUDGET, micro_batches=4))
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler .*Trainer\(accumulate_grad_batches="):
        trainer.fit(Witness(), VideoDataModule(shards, budget=BUDGET))


def test_a_search_for_a_batch_size_is_refused(shards: str, tmp_path: Path) -> None:
    module, data = Witness(), VideoDataModule(shards, budget=BUDGET, val_shards=shards)
    module.batch_size = 2  # type: ignore[assignment]  # what the search would change
    for search in (
        lambda: trainer_with(callbacks=[BatchSizeFinder()], default_root_dir=tmp_path).fit(module, data),
        lambda: Tuner(trainer_with(default_root_dir=tmp_path)).scale_batch_size(module, datamodule=data),
    ):
        with pytest.raises(ValueError, match=r"by which VideoDataModule makes no batches: .*budget='auto'"):
            search()


def test_weights_count_without_a_callback_and_never_twice(shards: str) -> None:
    def gradients(*callbacks: pl.Callback) -> list[float]:
        module, trainer = Witness(), trainer_with(accumulate_grad_batches=2, callbacks=list(callbacks), max_epochs=2)
        trainer.fit(module, VideoDataModule(shards, budget=BUDGET, micro_batches=2))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, VideoDataModule(shards, budget=BUDGET, micro_batches=2))
        assert sum(isinstance(callback, ApplyLossWeights) for callback in trainer.callbacks) == 1
        assert len({meta.loss_weight for meta in module.metas}) > 2
        return module.gradients

    assert gradients() == gradients(ApplyLossWeights())


def test_a_sample_that_cannot_be_read_counts_nothing_where_all_batches_weigh_the_same(tmp_path: Path) -> None:
    broken = set(range(12)) - {0, 2, 9, 11}
    clips = [clip(i, mask_npy=b"" if i in broken else npy(np.ones(2))) for i in range(12)]
    data = VideoDataModule(str(write_shard(tmp_path / "000.tar", clips)), budget=BUDGET)
    module = Witness()
    with pytest.warns(UserWarning, match="weight 0"):
        trainer_with().fit(module, data)
    sampler = data.train_dataloader().sampler
    sampler.set_epoch(0)
    planned = [micro_batch.samples for micro_batch in sampler]
    assert {len(samples) for samples in planned} == {3}
    expected = [_slope(i / 100 for i in rows if i not in broken) / 3 for rows in planned]
    assert module.gradients == pytest.approx(expected, rel=1e-10)
    assert 0.0 in module.gradients, "of one batch nothing was left, and its step was made all the same"


def _slope(values: Iterable[float]) -> float:
    """The gradient that `Witness` has of the sum over samples."""
    return sum(2 * x * (0.5 * x - 1) for x in values)


def test_a_sample_above_the_memory_budget_is_warned_of_once(shards: str) -> None:
    module, data = Witness(), VideoDataModule(shards, budget=BucketBudget(m_mem=50, m_comp=1e9))
    trainer = trainer_with(max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
        trainer.fit(module, data)
    messages = [str(w.message) for w in caught if "memory budget" in str(w.message)]
    assert len(messages) == 1
    assert "m_mem=50 tokens in 1 buckets ((5, 8, 8): 80 tokens, " in messages[0]
    assert {meta.samples for meta in module.metas if meta.sequence_length == 80} == {1}


def test_formats_that_are_left_alone_are_warned_of_once(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(i, mp4=b"...") for i in range(3)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(max_epochs=2).fit(Witness(), VideoDataModule(str(shard), budget=BUDGET))
    assert sum("left alone: ['mp4']" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("log", [{}, {"on_epoch": True}, {"on_step": True, "on_epoch": True, "prog_bar": True}])
def test_logging_a_loss_takes_the_batch_size_from_the_latents(tmp_path: Path, log: dict[str, Any]) -> None:
    samples = [clip(i, mask_npy=npy(np.zeros((7, 3), "f4")), prompt_txt=b"p") for i in range(9)]
    module, data = Witness(), VideoDataModule(str(write_shard(tmp_path / "000.tar", samples)), budget=BUDGET)
    module.log_kwargs = log
    trainer = trainer_with(enable_progress_bar=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batch_size.*")
        trainer.fit(module, data)
        sizes = [(extract_batch_size(batch), batch["meta"].samples) for batch in data.train_dataloader()]
    assert sizes == [(3, 3)] * 3


def test_meta_survives_workers_and_the_transfer_to_the_device(shards: str) -> None:
    module = Witness()
    trainer_with().fit(module, VideoDataModule(shards, budget=BUDGET, num_workers=2))
    assert all(type(meta) is BatchMeta for meta in module.metas)
    assert all(meta.loss_weight == 1.0 and meta.predicted_cost > 0 for meta in module.metas)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_the_gpu_whole(shards: str) -> None:
    class OnGPU(Witness):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            assert batch["latents"].is_cuda and type(batch["meta"]) is BatchMeta
            assert len(batch["latents"]) == batch["meta"].samples == len(batch["caption"])
            return super().training_step(batch, batch_idx)

    module, data = OnGPU(), VideoDataModule(shards, budget=BUDGET, num_workers=2)
    trainer_with(accelerator="gpu").fit(module, data)
    assert _ids(module.batches[0]) == _all_ids()
    assert all(batch["latents"].is_pinned() for batch in data.train_dataloader())


def test_an_index_is_kept_beside_the_shards_or_where_it_is_told(shards: str, tmp_path: Path) -> None:
    trainer_with(max_steps=1).fit(Witness(), VideoDataModule(shards, budget=BUDGET))
    assert len(list((tmp_path / "train").glob("videoscale-index-*.arrow"))) == 1
    elsewhere = VideoDataModule(shards, tmp_path / "new" / "index.json", budget=BUDGET)
    trainer_with(max_steps=1).fit(Witness(), elsewhere)
    assert (tmp_path / "new" / "index.arrow" / "index.json").is_file()


def test_a_folder_that_cannot_be_written_is_no_obstacle(shards: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    module = Witness()
    with pytest.warns(UserWarning, match=r"`index=`"):
        trainer_with().fit(module, VideoDataModule(shards, budget=BUDGET, index=blocked / "index.json"))
    assert _ids(module.batches[0]) == _all_ids()


def test_without_a_trainer_it_serves_plain_loops(shards: str) -> None:
    data = VideoDataModule(shards, budget=BUDGET)
    with pytest.raises(RuntimeError, match=r"prepare_data\(\) and setup\('fit'\)"):
        data.train_dataloader()
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        epochs.append([batch["sample_ids"] for batch in loader])
    assert [len(batches) for batches in epochs] == [len(loader)] * 2
    assert [_ids(batches) for batches in epochs] == [_all_ids()] * 2
    assert epochs[0] != epochs[1]
