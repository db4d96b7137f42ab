"""RunReport over two gloo processes: what both did, written once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.cost.benchmark.measure_shapes import provenance_of
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with
from tests.data.clips import write_shards
from tests.data.training import Witness
from tests.distributed.callbacks.test_callbacks_and_metrics import OneGroup
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.timing.slow_training import Pace, Paced, Rows, strategy_called

Ranks = Callable[[int], ProcessPool]


class UnequallySlow(Slope):
    """Rank 0 computes for 40 ms, rank 1 for 160 ms."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        time.sleep(0.04 if self.global_rank == 0 else 0.16)
        return super().training_step(batch, batch_idx)


def _train(folder: Path, one_group: bool) -> Path | None:
    rank = torch.distributed.get_rank()
    metas = [Meta(samples=1 if rank == 0 or one_group else 3, sequence_length=10)] * 5
    report = RunReport(folder, every_n_steps=2)
    strategy: Any = OneGroup() if one_group else "ddp"
    trainer = trainer_with(report, strategy=strategy, devices=2, use_distributed_sampler=False)
    trainer.fit(UnequallySlow(), batches_of(metas))
    return report.path


def _train_under(name: str, folder: Path) -> tuple[int, ...]:
    with deepspeed_on_cpu():
        module = Paced(Pace())
        parameters = sum(parameter.numel() for parameter in module.parameters())
        of_matrix: list[int] = []
        asks = LambdaCallback(on_train_start=lambda trainer, _: of_matrix.append(provenance_of(trainer)["parameters"]))
        trainer_with(RunReport(folder), asks, strategy=strategy_called(name), devices=2).fit(
            module, DataLoader(Rows(Pace(), 4))
        )
    return parameters, *of_matrix


@needs_deepspeed
def test_parameters_that_are_partitioned_are_counted_whole(ranks: Ranks, tmp_path: Path) -> None:
    (parameters, of_matrix), _ = ranks(2).run(_train_under, "zero3", tmp_path)
    assert [start["parameters"] for start in _records(tmp_path, "start")] == [parameters]
    assert of_matrix == parameters, "by which a matrix of shapes knows its model"


def _records(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "run_log.jsonl").read_text().splitlines() if line]
    return [row for row in rows if row["kind"] == kind]


def test_ranks_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_train, tmp_path, False) == [tmp_path / "report.html", None]
    windows = _records(tmp_path, "window")
    assert [window["steps"] for window in windows] == [2, 2, 1]
    for window in windows:
        assert window["compute_cv"] == [0.5] * window["steps"]  # loads 100 and 300
        assert window["tokens"] == window["steps"] * 40 and window["samples"] == window["steps"] * 4
    # The first steps may be slow for reasons of their own. Rank 1 computes 120 ms more, and rank 0 waits for it.
    for window in windows[1:]:
        assert all(0.4 < spread < 0.9 for spread in window["cv_step"])  # (160 - 40) / 160, on a busy machine
        parts = window["ranks"]
        fast, slow = (forward + backward for forward, backward in zip(parts["forward"], parts["backward"], strict=True))
        assert window["slowest_seconds"] == pytest.approx(slow)
        assert window["idle_seconds"] == pytest.approx((slow - fast) / 2)
        assert parts["wait"][0] > (slow - fast) / 2 > parts["wait"][1]
    assert [row[3:6] for row in windows[0]["batches"]] == [[10, 1, 2], [10, 3, 2]]
    html = (tmp_path / "report.html").read_text()
    assert "Not balanced" in html


def test_a_sequence_parallel_group_counts_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_train, tmp_path, True)
    for window in _records(tmp_path, "window"):
        assert window["cv_step"] == window["compute_cv"] == [0.0] * window["steps"]
        assert window["tokens"] == window["steps"] * 10
        assert window["slowest_seconds"] >= 0.16 * window["steps"]
        assert len(window["ranks"]["forward"]) == 2


def _train_on_shards(folder: Path, shards: str) -> None:
    data = VideoDataModule(shards, budget=BucketBudget(160, 160 * 80), balance="equal_token")
    strategy = SequenceParallelDDPStrategy(ulysses_size=1)
    trainer_with(RunReport(folder, every_n_steps=3), strategy=strategy, devices=2).fit(Witness(), data)


def test_the_balances_are_compared_on_the_clips_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_train_on_shards, tmp_path / "run", write_shards(tmp_path / "shards", 120))
    [plan], [start] = _records(tmp_path / "run", "plan"), _records(tmp_path / "run", "start")
    assert plan["balance"] == "equal_token" and plan["dp_size"] == 2
    assert start["exchange"] == {
        "strategy": "SequenceParallelDDPStrategy",
        "data-parallel ranks": 2,
        "ulysses": 1,
        "ring": 1,
        "transport": "collective",
        "schedule": "serial",
        "attention": "auto",
        "activation checkpointing": False,
        "compile": False,
        "graphs": False,
    }
    assert sum(window["samples"] for window in _records(tmp_path / "run", "window")) == 120
    html = (tmp_path / "run" / "report.html").read_text()
    for balance in ("planned", "dual_constraint", "equal_token"):
        assert f'<tr><th scope="row">{balance} <small>predicted</small></th>' in html


class Sharded(Slope):
    """Has a parameter of its own, so that FSDP2 shards the LightningModule itself and makes it an `FSDPSharded`."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))  # FSDP2 shards no scalars


def _train_sharded(folder: Path) -> str:
    module = Sharded()
    trainer = trainer_with(RunReport(folder), strategy="ulysses_fsdp2", devices=1)
    trainer.fit(module, batches_of([Meta(samples=1, sequence_length=10)]))
    return type(module).__name__


def test_a_sharded_module_has_the_name_of_its_class(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(_train_sharded, tmp_path) == ["FSDPSharded"]
    assert [start["module"] for start in _records(tmp_path, "start")] == ["Sharded"]
    assert "Run of Sharded" in (tmp_path / "report.html").read_text()
