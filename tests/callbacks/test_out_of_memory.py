"""A rank runs out of memory: all ranks end and say with what; the run goes on from the checkpoint with less."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_videoscale.callbacks import BudgetRecalibrator
from lightning_videoscale.callbacks.out_of_memory import OutOfMemory, is_out_of_memory, keep, kept_in
from lightning_videoscale.data import VideoDataModule
from tests.callbacks.failing_for_memory import BUDGET, HELD, train
from tests.data.clips import write_shards
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
INCIDENT = OutOfMemory(
    step=7,
    rank=3,
    shape=(5, 8, 8),
    samples=4,
    sequence_length=80,
    m_mem=330.0,
    allocated_gib=None,
    capacity_gib=None,
    machine=("cpu", 1, 1),
)


def test_the_error_says_what_did_not_fit_and_the_restart_takes_less(tmp_path: Path) -> None:
    shards, folder = write_shards(tmp_path / "train", 120), str(tmp_path / "checkpoints")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(shards, folder, "auto", devices=1)
    (incident,) = kept_in([folder])
    assert raised.value.__notes__[0] == str(incident)
    assert HELD < incident.tokens <= BUDGET.m_mem and incident.m_mem == 320
    result = train(shards, folder, "auto", f"{folder}/last.ckpt", devices=1)
    assert result["m_mem"] == incident.m_mem_after
    assert result["tokens"] and max(result["tokens"]) <= incident.m_mem_after < HELD


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["sequence_parallel", "ddp"])
def test_the_restart_lowers_the_budget_and_finishes(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    shards, folder = write_shards(tmp_path / "train", 120), tmp_path / "checkpoints"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    run = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.failing_for_memory", shards, str(folder), strategy],
        env=kept | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    output = run.stdout + run.stderr
    assert run.returncode != 0, output
    assert "Out of memory on rank 1 at step " in output and "CUDA out of memory" in output, output
    if strategy == "sequence_parallel":
        assert "[rank 0] The first error of the job was on rank 1: OutOfMemoryError" in output, output

    (incident,) = kept_in([str(folder)])
    assert HELD < incident.tokens <= BUDGET.m_mem and f"B * S = {incident.tokens:g}, M_mem = 320" in output
    results = ranks(2).run(train, shards, str(folder), strategy, str(folder / "last.ckpt"))
    for result in results:
        assert result["m_mem"] == incident.m_mem_after
        assert result["tokens"] and max(result["tokens"]) <= incident.m_mem_after < HELD
        assert "M_mem from 320 to" in result["history"][0]["reason"]
        assert "after: Out of memory on rank 1" in result["history"][0]["reason"]
    assert len({len(result["tokens"]) for result in results}) == 1


class DecodingCallback(pl.Callback):
    """Stands for one that decodes samples once a micro-batch is done."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_no_micro_batch_is_blamed_for_what_comes_beside_it(tmp_path: Path) -> None:
    shards, root = write_shards(tmp_path / "train", 20), tmp_path / "run"
    data = VideoDataModule(shards, budget=BUDGET)
    trainer = trainer_with(callbacks=[DecodingCallback(), BudgetRecalibrator()], default_root_dir=root)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.fit(Witness(), data)
    assert not hasattr(raised.value, "__notes__") and not kept_in([str(root)])


def test_a_note_lies_beside_the_checkpoint_that_is_resumed(tmp_path: Path) -> None:
    shards, first, second = write_shards(tmp_path / "train", 120), str(tmp_path / "first"), str(tmp_path / "second")
    for folder, start in ((first, None), (second, f"{first}/last.ckpt")):
        with pytest.raises(torch.OutOfMemoryError):
            train(shards, folder, "auto", start, devices=1)
        os.remove(next(Path(folder).glob("out_of_memory-*.json")))  # as if nobody had heeded it
    assert kept_in([first])


def test_notes_are_read_back_and_cut_ones_left_out(tmp_path: Path) -> None:
    other = replace(INCIDENT, rank=1, shape=())
    for incident in (INCIDENT, other):
        keep(incident, str(tmp_path / "new"))
    (tmp_path / "new" / "out_of_memory-step=8-rank=0.json").write_text('{"step": 8, "ra')
    earlier = tmp_path / "new" / "out_of_memory-step=7-rank=1.json"  # of a release that knew no overheads
    earlier.write_text(earlier.read_text().replace(', "overhead_tokens": 0.0', ""))
    assert kept_in([str(tmp_path / "none"), str(tmp_path / "new")]) == [other, INCIDENT]
    assert INCIDENT.m_mem_after == 288
    assert "rank 3 at step 7: B = 4 samples of 5x8x8 of S = 80 tokens, B * S = 320, M_mem = 330" in str(INCIDENT)
    assert "One sample alone does not fit" in str(replace(INCIDENT, samples=1))


def test_notes_are_found_in_folders_of_any_name(tmp_path: Path) -> None:
    keep(INCIDENT, str(tmp_path / "run[lr=1]"))
    assert kept_in([str(tmp_path / "run[lr=1]")]) == [INCIDENT]


def test_notes_are_found_behind_a_url() -> None:
    keep(INCIDENT, "memory://notes/[1]")
    assert kept_in(["memory://notes/[1]"]) == [INCIDENT] and not kept_in(["memory://notes/[2]"])


def test_only_failures_of_this_machine_lower_the_budget(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "train", 20)

    def m_mem_with(incident: OutOfMemory) -> float:
        keep(incident, str(tmp_path / "run"))
        recalibrator = BudgetRecalibrator()
        trainer_with(callbacks=[recalibrator], default_root_dir=tmp_path / "run", max_steps=1).fit(
            Witness(), VideoDataModule(shards, budget=BUDGET)
        )
        assert recalibrator.calibration is not None
        return recalibrator.calibration.budget.m_mem

    with pytest.warns(UserWarning, match="another machine.*rank 3"):
        assert m_mem_with(replace(INCIDENT, machine=("cpu", 8, 1))) == 320
    assert m_mem_with(INCIDENT) == 288


@pytest.mark.parametrize("of_then", [0.0, 20.0, 50.0])
def test_what_samples_take_beside_their_tokens_counts_in_what_did_not_fit(tmp_path: Path, of_then: float) -> None:
    """By the budget that holds now: 4 samples of 80 tokens and 20 beside them, whatever the run before counted."""
    keep(replace(INCIDENT, overhead_tokens=of_then), str(tmp_path))
    recalibrator, budget = BudgetRecalibrator(), replace(BUDGET, m_mem=420, overhead_tokens=20.0)
    data = VideoDataModule(write_shards(tmp_path / "train", 20), budget=budget)
    trainer_with(callbacks=[recalibrator], default_root_dir=tmp_path, max_steps=1).fit(Witness(), data)
    assert recalibrator.calibration is not None
    assert recalibrator.calibration.budget == replace(budget, m_mem=360)
    assert "B * (S + 20) = 400" in recalibrator.history[0]["reason"]


def test_the_failure_that_decides_is_named(tmp_path: Path) -> None:
    decisive, folder = replace(INCIDENT, samples=3, step=2), str(tmp_path)
    for incident in (decisive, INCIDENT, replace(INCIDENT, step=9, machine=("cpu", 8, 1))):
        keep(incident, folder)
    recalibrator, data = BudgetRecalibrator(), VideoDataModule(write_shards(tmp_path / "train", 20), budget=BUDGET)
    with pytest.warns(UserWarning, match="another machine"):
        trainer_with(callbacks=[recalibrator], default_root_dir=folder, max_steps=1).fit(Witness(), data)
    assert recalibrator.history[0]["m_mem"] == 216
    assert str(decisive) in recalibrator.history[0]["reason"]


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("connection closed"))
    assert not is_out_of_memory(ValueError("out of memory"))
