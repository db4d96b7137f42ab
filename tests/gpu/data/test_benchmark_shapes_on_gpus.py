"""benchmark_shapes and budget="auto" on CUDA: peaks, memory that runs out, a benchmark at the start of fit."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_videoscale as vs
from lightning_videoscale.cost import MemoryModel, ShapeMatrix, StepTimeModel
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data import RandomBatches, VideoDataModule
from lightning_videoscale.data.planning.shapes import ClipShape
from tests.cost.benchmark.flow import Flow
from tests.data.clips import write_shards
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], ProcessPool]

# 64 to 9216 tokens.
SHAPES = [ClipShape(f, side, side, True) for f, side in ((1, 16), (3, 16), (3, 32), (5, 48), (9, 64))]
GIB = 2**30


class Wider(Flow):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = tiny_wan(num_layers=4, attention_head_dim=64, ffn_dim=1024)
        self.batches = deque(maxlen=1)  # type: ignore[assignment]  # those kept would be part of the peaks


@pytest.fixture
def capped() -> Iterator[Callable[[float], None]]:
    """Lets this process have so many bytes only."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


def _benchmark(**settings: Any) -> tuple[ShapeMatrix, bool]:
    module = Wider()
    before = copy.deepcopy(module.state_dict())
    trainer = trainer_with(accelerator="cuda", devices=1)
    matrix = vs.benchmark_shapes(
        trainer, module, SHAPES, batches=RandomBatches(4), seconds=0.05, progress=False, **settings
    )
    return matrix, all(torch.equal(value.cpu(), before[name].cpu()) for name, value in module.state_dict().items())


def test_times_and_peaks_grow_with_the_tokens() -> None:
    matrix, same = _benchmark()
    assert same and matrix.provenance["gpu"] == torch.cuda.get_device_name(0)
    measurements = matrix.measurements
    assert len(measurements) == len(matrix.rows) and all(m.peak_bytes for m in measurements)
    memory = MemoryModel.fit(measurements)
    assert memory.worst_excess < 0.5, matrix.rows
    assert matrix.capacity_bytes is not None
    assert max(m.samples * m.sequence_length for m in measurements) < memory.m_mem(matrix.capacity_bytes)
    assert StepTimeModel.fit(measurements).predict(4, 9216) > StepTimeModel.fit(measurements).predict(1, 9216)


class Deep(Flow):
    """Its gradients take 0.6 GB."""

    def __init__(self) -> None:
        super().__init__()
        wide = {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 4096}
        self.transformer = tiny_wan(num_layers=8, rope_max_seq_len=64, **wide)
        self.batches = deque(maxlen=1)  # type: ignore[assignment]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_predicted_from_short_clips_is_what_a_long_one_takes(micro_batches: int) -> None:
    def trainer(**settings: Any) -> pl.Trainer:
        strategy = vs.SequenceParallelDDPStrategy(1, activation_checkpointing=True, graphs=False)
        return trainer_with(accelerator="cuda", devices=1, strategy=strategy, precision="bf16-mixed", **settings)

    short = [ClipShape(frames, 64, 64, True) for frames in (1, 2, 3, 4)]  # 1024 tokens a frame
    matrix = vs.benchmark_shapes(trainer(), Deep(), short, batches=RandomBatches(4), seconds=0.05, progress=False)
    weights = sum(p.nbytes for p in Deep().parameters())
    # Weights, two states, and gradients in DDP's buckets, which are made anew one by one.
    assert all(4 * weights < (row.start_bytes or 0) < 5 * weights for row in matrix.rows), matrix.rows
    model = MemoryModel.fit(matrix.measurements, accumulates=micro_batches > 1)

    batch = RandomBatches(4)(Cell(ClipShape(40, 64, 64, True), 40_960, 1))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer(max_steps=3, accumulate_grad_batches=micro_batches).fit(
        Deep(), DataLoader([batch] * 3 * micro_batches, batch_size=None)
    )
    ratio = torch.cuda.max_memory_allocated() / model.predict(1, 40_960)
    assert 0.97 < ratio < 1.01 + model.worst_excess, (ratio, model, matrix.rows)


def test_shapes_are_timed_by_graphs_as_they_train() -> None:
    def measured(graphs: bool) -> ShapeMatrix:
        strategy = vs.SequenceParallelDDPStrategy(graphs=graphs, graphs_max_memory=0.5)
        trainer = trainer_with(accelerator="cuda", devices=1, strategy=strategy)
        batches = RandomBatches(4)
        return vs.benchmark_shapes(trainer, Wider(), SHAPES[:2], batches=batches, seconds=0.05, progress=False)

    eager, by_graphs = measured(False), measured(True)
    assert not any(row.by_graph for row in eager.rows)
    assert all(row.by_graph for row in by_graphs.rows), by_graphs.rows
    seconds = [{(m.samples, m.sequence_length): m.seconds for m in each.measurements} for each in (eager, by_graphs)]
    assert all(seconds[1][shape] < seconds[0][shape] for shape in seconds[0]), (
        seconds
    )  # 64 and 192 tokens wait for the host


def test_memory_that_runs_out_is_a_result(capped: Callable[[float], None]) -> None:
    free, _ = _benchmark(max_tokens=4 * 9216)
    largest = max(free.rows, key=lambda row: row.peak_bytes or 0.0)
    middle = [row.peak_bytes for row in free.rows if row.samples * row.sequence_length <= 9216]
    torch.cuda.empty_cache()
    limit = (max(peak or 0.0 for peak in middle) + (largest.peak_bytes or 0.0)) / 2
    capped(limit)
    matrix, same = _benchmark(max_tokens=4 * 9216)
    assert same and matrix.capacity_bytes == pytest.approx(limit)
    outcomes = {(row.samples, row.sequence_length): row.outcome for row in matrix.rows}
    assert "out_of_memory" in outcomes.values() and outcomes[1, 64] == "measured", (limit, matrix.rows)
    assert outcomes[1, 9216] == "measured", (limit, matrix.rows)  # what is smaller, after memory has run out


def test_a_benchmark_at_the_start_of_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = VideoDataModule(write_shards(tmp_path, 40))
    trainer_with(accelerator="cuda", devices=1).fit(Flow(), data)
    assert "budget='auto', measured on" in caplog.text
    assert data.planner is not None and data.planner.step_time is not None, caplog.text
    assert data.planner.budget.m_mem > 80, caplog.text  # this GPU holds more than the longest clip


def _auto_on_two(shards: str) -> tuple[Any, bool]:
    module, data = Flow(), VideoDataModule(shards)
    trainer = trainer_with(accelerator="cuda", strategy="ddp", devices=2)
    trainer.fit(module, data)
    assert data.planner is not None
    return (data.planner.budget, data.planner.step_time), all(bool(p.isfinite().all()) for p in module.parameters())


def test_two_gpus_find_one_budget(tmp_path: Path, gpu_ranks: Ranks) -> None:
    mine, theirs = gpu_ranks(2).run(_auto_on_two, write_shards(tmp_path, 40))
    assert mine == theirs and mine[1]
