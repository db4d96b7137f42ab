"""Budgets that follow what the ranks take, in real training runs; times are scripted where figures are compared."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.callbacks import BudgetRecalibrator
from lightning_videoscale.callbacks.budget_recalibrator import observations_of
from lightning_videoscale.callbacks.device_memory import DeviceMemory, MemoryGauge
from lightning_videoscale.cost import BucketBudget, StepTimeModel, TimeBudget
from lightning_videoscale.cost.step_time import AdditiveCost, PowerLaw
from lightning_videoscale.data import Batch, VideoDataModule
from lightning_videoscale.timing import Marks, MicroBatchLoad, StepTimes, StepWindow, step_timer
from tests.callbacks.toy import MemoryLogger
from tests.data.clips import clip, write_shard
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool
from tests.timing.windows import window_of

Ranks = Callable[[int], ProcessPool]
SHAPES = [(4, f, s, s) for f in (1, 3, 5) for s in (4, 8, 16)]  # 4 to 320 tokens
LONGEST = 320
SAMPLES = 400


def power_law(a: float, b: float, p: float) -> StepTimeModel:
    return StepTimeModel(PowerLaw(a, b, p, 1.0), AdditiveCost(a, 0.0, b), 0.0, 1.0)


TRUTH = power_law(0.1, 0.9 / LONGEST**1.9, 1.9)
WRONG = power_law(0.2, 1.8 / LONGEST**2.2, 2.2)
ORACLE = TimeBudget(2 * LONGEST, 2.0, TRUTH)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = np.random.default_rng(0)
    clips = [clip(i, SHAPES[draw.integers(len(SHAPES))]) for i in range(SAMPLES)]
    folder = tmp_path_factory.mktemp("shards")
    for number in range(2):
        write_shard(folder / f"{number:03}.tar", clips[number::2])
    return str(folder / "{000..001}.tar")


class ScriptedTime(Marks):
    """A clock that somebody else moves."""

    now = 0.0

    def set(self) -> float:
        return self.now


class Timed(Witness):
    """Takes for every micro-batch what the true costs are, and a little noise; rank 1 takes half as much again."""

    def __init__(self) -> None:
        super().__init__()
        self.time = ScriptedTime()

    def on_train_start(self) -> None:
        self.draw = np.random.default_rng(self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        meta, speed = batch["meta"], 1 + 0.5 * self.global_rank
        seconds = speed * float(TRUTH.predict(meta.samples, meta.sequence_length))
        self.time.now += seconds * math.exp(0.02 * self.draw.standard_normal())
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.time.now += 7.0  # which is not the micro-batch's work


def data(shards: str, step_time: StepTimeModel = WRONG, **settings: Any) -> VideoDataModule:
    return VideoDataModule(shards, budget=step_time.budget(2.0, 2 * LONGEST), step_time=step_time, **settings)


def fit(shards: str, *callbacks: pl.Callback, resume: Path | None = None, **trainer: Any) -> Timed:
    module = Timed()
    settings = {"max_epochs": 3, "callbacks": list(callbacks)}
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of training batches")
        patched.setattr(step_timer, "marks_on", lambda device: module.time)
        trainer_with(**(settings | trainer)).fit(module, data(shards), ckpt_path=resume)
    return module


def test_wrong_costs_become_right_within_an_epoch(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    recalibrator, logger = BudgetRecalibrator(every_n_steps=8, target_sync=2.0), MemoryLogger()
    module = fit(shards, recalibrator, logger=logger)
    for batches in module.batches.values():
        assert sorted(itertools.chain(*batches)) == sorted(f"{i % 2:03}.tar/clip{i:05}" for i in range(SAMPLES))
    assert recalibrator.calibration is not None
    found = recalibrator.calibration.budget
    assert found.p == pytest.approx(ORACLE.p, abs=0.01)
    assert found.room(LONGEST) == pytest.approx(ORACLE.room(LONGEST), rel=0.05)
    sizes = {length: ORACLE.batch_size(length) for length in (16, 80, 320)}
    assert {length: found.batch_size(length) for length in sizes} == sizes

    versions = list(dict.fromkeys(meta.cost_version for meta in module.metas))
    assert len(versions) == len(recalibrator.history) + 1 == 3, "every change reached the batches"
    assert recalibrator.history[0]["step"] == 3 + 8 and "tokens^2.2 to target_sync" in recalibrator.history[0]["reason"]
    assert recalibrator.history[-1]["version"] == recalibrator.calibration.version
    logged = [row for _, row in logger.rows if "recalibration/p" in row]
    assert logged[-1]["recalibration/target_sync"] == 2.0
    targets = [row["recalibration/target_sync"] for row in logged]
    assert 1.0 < targets[0] < 2.0 and set(targets[1:]) == {2.0}, "the longest micro-batch grows step by step"


def test_a_run_that_goes_on_continues_the_calibration(shards: str, tmp_path: Path) -> None:
    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 30:
                trainer.save_checkpoint(tmp_path / "run.ckpt")
                self.at_30 = first.calibration

    first, resumed, saving = BudgetRecalibrator(8, 2.0), BudgetRecalibrator(8, 2.0), Saving()
    fit(shards, first, saving, max_steps=60)
    module = fit(shards, resumed, resume=tmp_path / "run.ckpt", max_steps=80)
    assert first.calibration is not None and resumed.calibration is not None
    before = [change for change in first.history if change["step"] <= 30]
    assert resumed.history[: len(before)] == before != []
    assert module.metas[0].cost_version == saving.at_30.step_time.version
    assert resumed.calibration.budget.room(LONGEST) == pytest.approx(ORACLE.room(LONGEST), rel=0.05)


def test_another_fit_begins_without_the_calibration_of_the_run_before(shards: str, tmp_path: Path) -> None:
    recalibrator, file = BudgetRecalibrator(8, 2.0), tmp_path / "run.ckpt"
    fit(shards, recalibrator, SaveAndStop(file, step=30))
    fit(shards, recalibrator, resume=file, max_steps=32)
    assert recalibrator.history
    module = fit(shards, recalibrator, max_steps=2)
    assert module.metas[0].cost_version == WRONG.version
    assert recalibrator.calibration is not None and recalibrator.calibration.step_time.version == WRONG.version
    assert not recalibrator.history


def test_a_trainer_that_fits_again_goes_on_with_its_calibration(shards: str) -> None:
    recalibrator, planned = BudgetRecalibrator(8, 2.0), data(shards)
    trainer = trainer_with(callbacks=[recalibrator], max_epochs=9, max_steps=20)
    trainer.fit(Witness(), planned)
    before = recalibrator.state_dict()
    trainer.fit_loop.epoch_loop.max_steps = 22
    trainer.fit(Witness(), planned)
    assert trainer.global_step == 22
    assert recalibrator.state_dict() == before


def test_what_fails_does_not_stop_the_training(shards: str) -> None:
    class Failing(BudgetRecalibrator):
        def _decide(self, window: StepWindow) -> Any:
            raise ArithmeticError("no fit")

    recalibrator = Failing(every_n_steps=4)
    with pytest.warns(UserWarning, match="ArithmeticError"):
        module = fit(shards, recalibrator, max_epochs=1)
    assert recalibrator.history == [] and len(module.metas) > 4


def test_a_group_takes_its_slowest_ranks_compute_and_exchange() -> None:
    """The quantity that the shape benchmark measures, so that costs do not jump when the recalibrator takes over."""
    quick = StepTimes(forward=1.0, backward=2.0, exchange=1.5, wait=9.0, data=3.0, optimizer=1.0)
    slow = quick._replace(forward=1.5, exchange=1.2)
    load = MicroBatchLoad(samples=2, sequence_length=80)
    window = window_of([[slow, quick], [quick, quick], [quick, slow]], [[load, load]] * 2 + [[load, MicroBatchLoad()]],
                       dp_ranks=[4, 4, 2])  # fmt: skip
    found = [(m.dp_rank, m.samples, m.sequence_length, m.seconds) for m in observations_of(window)]
    assert found == [(2, 2, 80, 4.5), (4, 2, 80, 4.7), (4, 2, 80, 4.5)]
    assert quick.work == 4.5, "what the benchmark takes"


def test_without_a_plan_it_says_that_it_does_nothing(shards: str) -> None:
    module = Witness()
    source = data(shards)
    source.prepare_data()
    source.setup("fit")
    with pytest.warns(UserWarning, match="VideoDataModule"):
        trainer_with(callbacks=[BudgetRecalibrator(1)], max_steps=2).fit(module, source.train_dataloader())
    assert len(module.metas) == 2


class ScriptedGauge(MemoryGauge):
    """A device of 10 000 bytes, of which a token takes 4 and the rest of the model 2 000."""

    def __init__(self, module: Witness) -> None:
        super().__init__(torch.device("cpu"))
        self.module = module

    def reset_peak(self) -> None:
        pass

    def peak(self) -> float:
        meta = self.module.metas[-1]
        return 2000.0 + 4.0 * meta.samples * meta.sequence_length

    def read(self) -> DeviceMemory:
        return DeviceMemory(2000.0, 2000.0, self.peak(), 0.0, capacity=10_000.0)


class OnThisDevice(BudgetRecalibrator):
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.module = pl_module
        super().on_train_start(trainer, pl_module)

    def gauge_of(self, trainer: pl.Trainer) -> MemoryGauge:
        return ScriptedGauge(self.module)


def test_peaks_of_memory_move_its_budget(shards: str) -> None:
    recalibrator = OnThisDevice(every_n_steps=4, target_sync=20.0)
    module = fit(shards, recalibrator, max_epochs=3)
    fits = (10_000 * 0.92 - 2000) / 4
    assert recalibrator.calibration is not None
    assert recalibrator.calibration.budget.m_mem == pytest.approx(fits, rel=0.1)
    assert max(meta.samples * meta.sequence_length for meta in module.metas) <= fits
    assert any("M_mem from 640 to 800 tokens, by peaks" in change["reason"] for change in recalibrator.history)


def _fit_on_two_ranks(shards: str, strategy: str) -> dict[str, Any]:
    class Noting(pl.Callback):
        def __init__(self) -> None:
            self.versions: list[str] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            assert recalibrator.calibration is not None
            self.versions.append(recalibrator.calibration.version + trainer.datamodule.planner.step_time.version)

    recalibrator, noting, module = BudgetRecalibrator(every_n_steps=8, target_sync=2.0), Noting(), Timed()
    built = SequenceParallelDDPStrategy(ulysses_size=1) if strategy == "sequence_parallel" else strategy
    trainer = trainer_with(strategy=built, devices=2, callbacks=[recalibrator, noting])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_timer, "marks_on", lambda device: module.time)
        trainer.fit(module, data(shards))
    assert recalibrator.calibration is not None
    return {
        "versions": noting.versions,
        "history": recalibrator.history,
        "batches": module.batches,
        "p": recalibrator.calibration.budget.p,
        "speeds": recalibrator.state_dict()["recalibration"]["observed"]["speeds"],
    }


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("sequence_parallel", marks=pytest.mark.full)])
def test_two_ranks_hold_the_same_budgets_at_every_step(shards: str, ranks: Ranks, strategy: str) -> None:
    first, second = ranks(2).run(_fit_on_two_ranks, shards, strategy)
    assert first["versions"] == second["versions"] and len(set(first["versions"])) > 2
    assert first["history"] == second["history"]
    seen = {name for rank in (first, second) for batch in rank["batches"][0] for name in batch}
    assert len(seen) == SAMPLES and len(first["batches"][0]) == len(second["batches"][0])
    assert first["p"] < 2.05, "on its way to 1.9"
    assert dict(first["speeds"])[1] == pytest.approx(1.5, rel=0.03) and dict(first["speeds"])[0] == 1.0


class SaveAndStop(pl.Callback):
    def __init__(self, file: Path, step: int = 2) -> None:
        self.file, self.step = file, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)
            trainer.should_stop = True


def test_a_budget_that_was_changed_before_a_run_goes_on_counts(shards: str, tmp_path: Path) -> None:
    """Nothing was recalibrated; else what was adopted would go before it."""
    file = tmp_path / "begun.ckpt"
    wide, narrow = BucketBudget(2 * LONGEST, 2.0 * LONGEST**2), BucketBudget(LONGEST, 1.0 * LONGEST**2)
    first = BudgetRecalibrator(every_n_steps=1000)
    trainer_with(callbacks=[first, SaveAndStop(file)]).fit(Witness(), VideoDataModule(shards, budget=wide))
    for budget in (narrow, wide):
        data = VideoDataModule(shards, budget=budget)
        goes_on = BudgetRecalibrator(every_n_steps=1000)
        trainer_with(callbacks=[goes_on], max_steps=4).fit(Witness(), data, ckpt_path=file, weights_only=False)
        assert data.planner is not None and data.planner.budget == budget
        assert goes_on.calibration is not None and goes_on.calibration.budget == budget


def test_peaks_of_another_machine_are_dropped(shards: str, tmp_path: Path) -> None:
    file, budget = tmp_path / "begun.ckpt", BucketBudget(2 * LONGEST, 2.0 * LONGEST**2)
    first = BudgetRecalibrator(every_n_steps=1000)
    trainer_with(callbacks=[first, SaveAndStop(file)]).fit(Witness(), VideoDataModule(shards, budget=budget))
    state = first.state_dict()
    state["recalibration"] |= {"peaks": [[100, 1e9]], "m_mem_limit": 200.0}
    for machine, kept in ((state["machine"], [[100, 1e9]]), (["NVIDIA H200", 8, 4], [])):
        goes_on = BudgetRecalibrator(every_n_steps=1000)
        goes_on.load_state_dict(state | {"machine": machine})
        data = VideoDataModule(shards, budget=budget)
        trainer_with(callbacks=[goes_on], max_steps=2).fit(Witness(), data)
        assert goes_on.state_dict()["recalibration"]["peaks"] == kept
