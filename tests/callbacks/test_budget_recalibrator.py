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

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.callbacks import BudgetRecalibrator, budget_recalibrator
from lightning_videoscale.callbacks.peak_memory import PeakMemory
from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.cost.step_time import AdditiveCost, PowerLaw
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.timing import StepTimes
from tests.callbacks.toy import MemoryLogger
from tests.data.clips import clip, write_shard
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
SHAPES = [(4, f, s, s) for f in (1, 3, 5) for s in (4, 8, 16)]  # 4 to 320 tokens
LONGEST = 320
SAMPLES = 400


def power_law(a: float, b: float, p: float) -> StepTimeModel:
    return StepTimeModel(PowerLaw(a, b, p, 1.0), AdditiveCost(a, 0.0, b), 0.0, 1.0)


TRUTH = power_law(0.1, 0.9 / LONGEST**1.9, 1.9)
WRONG = power_law(0.2, 1.8 / LONGEST**2.2, 2.2)
ORACLE = TRUTH.budget(2.0, 2 * LONGEST)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = np.random.default_rng(0)
    clips = [clip(i, SHAPES[draw.integers(len(SHAPES))]) for i in range(SAMPLES)]
    folder = tmp_path_factory.mktemp("shards")
    for number in range(2):
        write_shard(folder / f"{number:03}.tar", clips[number::2])
    return str(folder / "{000..001}.tar")


class ScriptedWatch:
    """Says for every micro-batch what the true costs are, and a little noise; rank 1 takes half as much again."""

    def __init__(self, module: Witness) -> None:
        self.module, self.read_so_far = module, 0
        self.draw = np.random.default_rng(module.global_rank)

    def read(self) -> list[StepTimes]:
        metas, self.read_so_far = self.module.metas[self.read_so_far :], len(self.module.metas)
        speed = 1 + 0.5 * self.module.global_rank
        seconds = [speed * float(TRUTH.predict(meta.samples, meta.sequence_length)) for meta in metas]
        return [StepTimes(forward=s * math.exp(0.02 * self.draw.standard_normal()), wait=7.0) for s in seconds]

    def close(self) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_recalibrator, "watch_steps", lambda trainer: ScriptedWatch(trainer.lightning_module))


def data(shards: str, step_time: StepTimeModel = WRONG, **settings: Any) -> VideoDataModule:
    return VideoDataModule(shards, budget=step_time.budget(2.0, 2 * LONGEST), step_time=step_time, **settings)


def fit(shards: str, *callbacks: pl.Callback, resume: Path | None = None, **trainer: Any) -> Witness:
    module = Witness()
    settings = {"max_epochs": 3, "callbacks": list(callbacks)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of training batches")
        trainer_with(**(settings | trainer)).fit(module, data(shards), ckpt_path=resume)
    return module


@pytest.mark.usefixtures("scripted")
def test_wrong_costs_become_right_within_an_epoch(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    recalibrator, logger = BudgetRecalibrator(every_n_steps=8, target_sync=2.0), MemoryLogger()
    module = fit(shards, recalibrator, logger=logger)
    for batches in module.batches.values():
        assert sorted(itertools.chain(*batches)) == sorted(f"{i % 2:03}.tar/clip{i:05}" for i in range(SAMPLES))
    assert recalibrator.calibration is not None
    found = recalibrator.calibration.budget
    assert found.p == pytest.approx(ORACLE.p, abs=0.01)
    assert found.m_comp == pytest.approx(ORACLE.m_comp, rel=0.05)
    sizes = {length: ORACLE.batch_size(length) for length in (16, 80, 320)}
    assert {length: found.batch_size(length) for length in sizes} == sizes

    versions = list(dict.fromkeys(meta.cost_version for meta in module.metas))
    assert len(versions) == len(recalibrator.history) + 1 >= 4, "every change reached the batches"
    assert recalibrator.history[0]["step"] == 3 + 8 and "p = 2.200 to M_comp" in recalibrator.history[0]["reason"]
    assert recalibrator.history[-1]["version"] == recalibrator.calibration.version
    logged = [row for _, row in logger.rows if "recalibration/p" in row]
    assert logged[-1]["recalibration/m_comp"] == found.m_comp
    steps = [row["recalibration/p"] for row in logged]
    assert steps[0] == pytest.approx(2.12) and steps[0] >= steps[1] >= steps[2] >= steps[3] > 1.95


@pytest.mark.usefixtures("scripted")
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
    assert resumed.calibration.budget.m_comp == pytest.approx(ORACLE.m_comp, rel=0.05)


def test_what_fails_does_not_stop_the_training(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ScriptedWatch):
        def read(self) -> list[StepTimes]:
            if self.read_so_far:
                raise OSError("no clock")
            return super().read()

    monkeypatch.setattr(budget_recalibrator, "watch_steps", lambda trainer: Broken(trainer.lightning_module))
    recalibrator = BudgetRecalibrator(every_n_steps=4)
    with pytest.warns(UserWarning, match="could not read the times, training goes on: OSError\\('no clock'\\)"):
        fit(shards, recalibrator, max_epochs=1)
    assert recalibrator.history == []

    monkeypatch.setattr(budget_recalibrator, "watch_steps", lambda trainer: ScriptedWatch(trainer.lightning_module))
    monkeypatch.setattr(BudgetRecalibrator, "_decide", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="could not fit the costs, training goes on: ZeroDivisionError"):
        fit(shards, recalibrator, max_epochs=1)


@pytest.mark.usefixtures("scripted")
def test_without_a_plan_it_says_that_it_does_nothing(shards: str) -> None:
    module = Witness()
    source = data(shards)
    source.prepare_data()
    source.setup("fit")
    with pytest.warns(UserWarning, match="needs a VideoDataModule"):
        trainer_with(callbacks=[BudgetRecalibrator(1)], max_steps=2).fit(module, source.train_dataloader())
    assert len(module.metas) == 2


class ScriptedPeaks(PeakMemory):
    """A device of 10 000 bytes, of which a token takes 4 and the rest of the model 2 000."""

    def begin(self) -> None:
        pass

    def end(self, tokens: int) -> None:
        self._peaks[tokens] = 2000.0 + 4 * tokens

    def capacity(self) -> float:
        return 10_000.0


@pytest.mark.usefixtures("scripted")
def test_peaks_of_memory_move_its_budget(shards: str) -> None:
    class OnThisDevice(BudgetRecalibrator):
        def peak_memory_of(self, device: torch.device) -> PeakMemory:
            return ScriptedPeaks(device)

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

    recalibrator, noting, module = BudgetRecalibrator(every_n_steps=8, target_sync=2.0), Noting(), Witness()
    built = SequenceParallelDDPStrategy(ulysses_size=1) if strategy == "sequence_parallel" else strategy
    trainer = trainer_with(strategy=built, devices=2, callbacks=[recalibrator, noting])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(budget_recalibrator, "watch_steps", lambda trainer: ScriptedWatch(trainer.lightning_module))
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
