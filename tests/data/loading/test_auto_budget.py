"""budget="auto": what it finds, from where, and what it says about it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_videoscale.callbacks import FusedKernels
from lightning_videoscale.cost import BucketBudget, MatrixRow, ShapeMatrix, StepTimeModel
from lightning_videoscale.cost.benchmark import measure_shapes
from lightning_videoscale.cost.benchmark.measure_shapes import DECISIVE, provenance_of
from lightning_videoscale.cost.matrix import differences
from lightning_videoscale.data import AutoBudget, VideoDataModule
from lightning_videoscale.data.loading import datamodule, run_budget
from lightning_videoscale.data.planning.compute_budget import TriedBudget, best_of, try_budgets
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.cost.benchmark.flow import Flow
from tests.data.clips import write_shards
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]

# Of `Witness` in a Trainer on a CPU.
SETTING = {
    "gpu": None,
    "world_size": 1,
    "strategy": "SingleDeviceStrategy",
    "sequence_parallel_size": 1,
    "precision": "32-true",
    "module": "tests.data.training.Witness",
    "parameters": 1,
    "activation_checkpointing": False,
    "compile": False,
    "fused_modules": 0,
    "recompute_norms": False,
}


def _matrix(capacity: float = 4000.0, per_sample: float = 0.0, **setting: Any) -> ShapeMatrix:
    """Seconds = 0.1 + 1e-4 B S^1.8, bytes = 200 + 10 B S: the longest of the clips, 80 tokens, takes 0.367 s."""
    cells = [(b, s) for s in (4, 16, 48, 80) for b in (1, 2, 4)]
    rows = tuple(
        MatrixRow(
            1,
            2,
            2 * s,
            b,
            s,
            seconds=0.1 + 1e-4 * b * s**1.8,
            spread=0.0,
            wait_seconds=0.0,
            peak_bytes=200 + 10 * b * s + per_sample * b,
        )
        for b, s in cells
    )
    return ShapeMatrix(rows, SETTING | setting, capacity)


def _fit(data: VideoDataModule, module: pl.LightningModule | None = None, **settings: Any) -> Witness:
    module = module if module is not None else Witness()
    trainer_with(**settings).fit(module, data)
    return module  # type: ignore[return-value]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path, 60)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.message for record in caplog.records if "budget='auto'" in record.message]


def _budget(data: VideoDataModule) -> BucketBudget:
    assert data.planner is not None
    return data.planner.budget


def test_a_matrix_gives_memory_and_compute(shards: str, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    _matrix().save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json"))
    module = _fit(data)
    budget = _budget(data)
    # 95 % of 4000 bytes, less 200, at 10 bytes each; the power law is found again.
    assert budget.m_mem in (359, 360) and budget.p == 1.8
    # A tenth of a second in which nothing is trained is a quarter of what a micro-batch of one long sample takes.
    assert budget.m_comp == pytest.approx(2 * 80**1.8)
    assert {(m.sequence_length, m.samples) for m in module.metas} <= {
        (s, b) for s in (4, 16, 48, 80) for b in range(1, budget.batch_size(s) + 1)
    }
    assert data.planner is not None and data.planner.step_time is not None
    assert data.planner.step_time.predict(1, 80) == pytest.approx(0.1 + 1e-4 * 80**1.8, rel=1e-3)
    assert len(said()) == 1 and "matrix.json" in said()[0] and "M_mem = 3" in said()[0]
    for value in ("2 x", "80 tokens", "0.366 s", "100.0%"):
        assert value in said()[0]


def test_batches_take_the_target(shards: str, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    _matrix().save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json", target_sync=0.6))
    _fit(data)
    found = _budget(data)
    assert [found.room(s) for s in (4, 16, 48, 80)] == pytest.approx([5e3 / s**1.8 for s in (4, 16, 48, 80)], rel=1e-6)
    assert len(said()) == 1 and "target_sync = 0.6 s by the power law" in said()[0]


def test_the_matrix_beside_the_index_is_found_if_it_is_of_this_setting(
    shards: str, said: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    data = VideoDataModule(shards)
    _matrix().save(data.matrix_file)
    _fit(data)
    assert _budget(data).m_mem in (359, 360) and str(data.matrix_file) in said()[-1]

    _matrix(precision="bf16-mixed").save(data.matrix_file)
    other = VideoDataModule(shards)
    _fit(other)
    assert "'bf16-mixed'" in caplog.text and "'32-true'" in caplog.text
    assert _budget(other) == BucketBudget(80, 80.0**2, 2.0)
    assert "B * S^2" in said()[-1] and str(data.matrix_file) not in said()[-1]


def test_what_was_out_of_memory_is_not_planned(shards: str, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """Peaks of tensors leave room for 339 tokens, and 240 did not fit."""
    rows = (*_matrix().rows, MatrixRow(1, 2, 160, 3, 80, "out_of_memory"))
    replace(_matrix(), rows=rows).save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json", reserve=0.1))
    _fit(data)
    assert _budget(data).m_mem == 216 and "M_mem = 216 tokens" in said()[-1]
    exact = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json", reserve=0.0))
    _fit(exact)
    assert _budget(exact).m_mem == 239


def test_what_samples_take_beside_their_tokens_is_in_the_budget(
    shards: str, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    """As their text: (4000 * 0.9 - 200) / 10 tokens, of which every sample takes 4 more than it has."""
    _matrix(per_sample=40.0).save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json", reserve=0.1))
    _fit(data)
    assert (_budget(data).m_mem, _budget(data).overhead_tokens) == (pytest.approx(340, abs=1), pytest.approx(4))
    assert "as 4 tokens per sample" in said()[-1]


def test_a_matrix_beside_the_index_that_cannot_be_read_is_told(shards: str) -> None:
    data = VideoDataModule(shards)
    _matrix().save(data.matrix_file)
    whole = data.matrix_file.read_text()
    data.matrix_file.write_text(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=re.escape(str(data.matrix_file))):
        _fit(data)
    assert _budget(data).m_mem == 80


def test_a_matrix_of_another_setting_is_used_if_it_is_asked_for_and_warned_of(shards: str, tmp_path: Path) -> None:
    _matrix(gpu="NVIDIA H200").save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json"))
    with pytest.warns(UserWarning, match=r"gpu: 'NVIDIA H200' .*None"):
        _fit(data)
    assert _budget(data).p == 1.8


def test_flops_where_nothing_is_measured(shards: str, said: Callable[[], list[str]]) -> None:
    data = VideoDataModule(shards)
    _fit(data, Flow())
    budget = _budget(data)
    assert budget.m_mem == 80 and budget.m_comp == pytest.approx(80**budget.p)
    assert len(said()) == 1
    for value in ("FLOPs", "80 tokens", "100.0%", "2 x", "0.5%"):
        assert value in said()[0]
    assert not re.search(r"\d s\b", said()[0]), "FLOPs tell no seconds"


def test_what_was_asked_for_and_cannot_be_is_an_error(shards: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"AutoBudget\(matrix=\.\.\.\): .*nowhere\.json"):
        _fit(VideoDataModule(shards, budget=AutoBudget(tmp_path / "nowhere.json")))
    with pytest.raises(ValueError, match=r"target_sync=1\.0 s"):
        _fit(VideoDataModule(shards, budget=AutoBudget(target_sync=1.0)))
    _matrix(capacity=100.0).save(tmp_path / "full.json")
    with pytest.raises(ValueError, match="taken before the first token"):
        _fit(VideoDataModule(shards, budget=AutoBudget(tmp_path / "full.json")))


def test_too_few_shapes_leave_the_costs_to_the_flops(
    shards: str, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    whole = _matrix()
    ShapeMatrix(whole.rows[-3:], whole.provenance, whole.capacity_bytes).save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json"))
    _fit(data)
    assert _budget(data).m_mem in (359, 360) and _budget(data).p == 2.0
    assert "at least 6" in said()[0] and "got 3" in said()[0]


def test_a_step_time_of_the_users_own_goes_before_a_measured_one(shards: str, tmp_path: Path) -> None:
    _matrix().save(tmp_path / "matrix.json")
    mine = StepTimeModel.fit([m._replace(seconds=2 * m.seconds) for m in _matrix().measurements])
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json", target_sync=0.6), step_time=mine)
    _fit(data)
    assert data.planner is not None and data.planner.step_time == mine
    assert _budget(data).m_mem in (359, 360)
    assert _budget(data).room(80) == pytest.approx((0.6 - 0.2) / 2e-4 / 80**1.8, rel=1e-6)


def test_a_run_that_goes_on_keeps_its_budgets(shards: str, tmp_path: Path) -> None:
    data = VideoDataModule(shards)
    _matrix().save(data.matrix_file)
    keep = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    first = _fit(data, max_steps=2, callbacks=[keep], enable_checkpointing=True)
    data.matrix_file.unlink()

    again, module = VideoDataModule(shards), Witness()
    trainer_with().fit(module, again, ckpt_path=keep.best_model_path)
    assert _budget(again) == _budget(data)
    ids = [name for part in (first, module) for batch in part.batches[0] for name in batch]
    assert len(ids) == len(set(ids)) == 60

    explicit = VideoDataModule(shards, budget=BucketBudget(80, 6400))
    trainer_with().fit(Witness(), explicit, ckpt_path=keep.best_model_path)
    assert _budget(explicit) == BucketBudget(80, 6400)


def test_estimated_stepping_batches_is_told_by_the_budget_that_is_used(shards: str) -> None:
    class Scheduled(Witness):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Scheduled()
    _fit(VideoDataModule(shards), module, max_epochs=2)
    assert module.estimate == module.trainer.global_step


@pytest.mark.parametrize(("in_slots", "factor"), [(False, 2.0), (True, 1.2)])
def test_the_compute_budget_is_that_of_the_runs_own_ranks_and_strategy(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_slots: bool, factor: float
) -> None:
    # As one of three ranks sees it, under DDP and under FSDP2.
    monkeypatch.setattr(datamodule, "rank_and_size", lambda trainer: (0, 3))
    monkeypatch.setattr(run_budget, "waits_in_every_micro_batch", lambda trainer: in_slots)
    _matrix().save(tmp_path / "matrix.json")
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json"), micro_batches=2)
    _fit(data, accumulate_grad_batches=2)
    assert _budget(data).m_comp == pytest.approx(factor * 80**1.8)


def _another(tried: Sequence[TriedBudget], in_slots: bool) -> TriedBudget:
    return next(each for each in tried if each != best_of(tried, in_slots))


def _on_two_ranks(shards: str, matrix: str) -> tuple[BucketBudget, BucketBudget]:
    data = VideoDataModule(shards, budget=AutoBudget(matrix))
    # As if a processor that rounds otherwise saw a tie the other way.
    with mock.patch.object(run_budget, "best_of", _another if os.environ["RANK"] == "1" else best_of):
        trainer_with(strategy="ddp", devices=2).fit(Witness(), data)
    assert data.planner is not None and data.planner.dp_size == 2
    alone = replace(_budget(data), m_comp=80.0**1.8)
    return _budget(data), best_of(try_budgets(replace(data.planner, budget=alone))).budget


@pytest.mark.filterwarnings("ignore:.*another setting")
def test_all_ranks_have_one_budget(shards: str, tmp_path: Path, ranks: Ranks) -> None:
    _matrix().save(tmp_path / "matrix.json")
    (mine, best), (theirs, _) = ranks(2).run(_on_two_ranks, shards, str(tmp_path / "matrix.json"))
    assert mine == theirs == best and mine.p == 1.8


def _provenance(shards: str) -> list[Any]:
    found: list[Any] = []
    asks = LambdaCallback(on_train_start=lambda trainer, _: found.append(provenance_of(trainer)["parameters"]))
    with mock.patch.object(measure_shapes, "full_numel", lambda _: 7 + int(os.environ["RANK"])):
        trainer_with(strategy="ddp", devices=2, callbacks=[asks]).fit(Witness(), VideoDataModule(shards))
    return found


def test_what_a_measurement_holds_for_is_the_same_on_all_ranks(shards: str, ranks: Ranks) -> None:
    """As of GPUs of two names; else one rank would take an earlier measurement, and the other wait for a new one."""
    assert ranks(2).run(_provenance, shards) == [[7], [7]]


def _seen(shards: str, **settings: Any) -> dict[str, Any]:
    """Of a training of `Flow`, what a measurement would hold for."""
    seen: list[dict[str, Any]] = []
    asks = LambdaCallback(on_train_start=lambda trainer, _: seen.append(provenance_of(trainer)))
    callbacks = [*settings.pop("callbacks", []), asks]
    trainer_with(callbacks=callbacks, max_steps=1, **settings).fit(Flow(), VideoDataModule(shards))
    return seen[0]


def _under_ddp(shards: str, **arguments: Any) -> dict[str, Any]:
    return _seen(shards, strategy=SequenceParallelDDPStrategy(1, **arguments))


def test_what_a_measurement_holds_for_is_how_blocks_compute(shards: str, ranks: Ranks) -> None:
    """Memory differs many times over with activation checkpointing: a budget of a run without it would not fit."""
    arguments: list[dict[str, Any]] = [{}, {"activation_checkpointing": 0.5}, {"compile": {"backend": "eager"}}]
    plain, half, compiled = (ranks(1).run(_under_ddp, shards, **each)[0] for each in arguments)
    assert differences(plain, half, DECISIVE) == ["activation_checkpointing: False measured, 0.5 now"]
    assert differences(plain, compiled, DECISIVE) == ["compile: False measured, True now"]
    fused = _seen(shards, callbacks=[FusedKernels(recompute_norms=True)])
    assert differences(_seen(shards), fused, DECISIVE) == [
        "fused_modules: 0 measured, 5 now",
        "recompute_norms: False measured, True now",
    ]


def test_what_a_measurement_holds_for_is_whether_a_model_checkpoints_itself(shards: str) -> None:
    class Checkpointed(Witness):
        def configure_model(self) -> None:
            self.network = tiny_wan()
            self.network.enable_gradient_checkpointing()

    seen: list[Any] = []
    asks = LambdaCallback(on_train_start=lambda t, _: seen.append(provenance_of(t)["activation_checkpointing"]))
    for module in (Witness(), Checkpointed()):
        trainer_with(callbacks=[asks]).fit(module, VideoDataModule(shards))
    assert seen == [False, True]
