"""BottleneckAnalyzer in real Trainers on one process; tests/distributed has the bottlenecks between ranks."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import BottleneckAnalyzer, RunReport
from lightning_videoscale.report.reading import read_run
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with


class SlowKernel(Slope):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


class SlowOptimizer(Slope):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        time.sleep(0.05)


class SlowLoader(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.05)
        return super().__getitem__(index)


BATCHES = [{"x": batch["x"]} for batch in batches_of([Meta(1, 10)] * 4)]


@pytest.mark.timed
@pytest.mark.parametrize(
    ("module", "rows", "name"),
    [
        (SlowKernel(), BATCHES, "kernels"),
        (SlowOptimizer(), BATCHES, "optimizer"),
        (Slope(), SlowLoader(BATCHES), "data"),
    ],
)
def test_what_is_slow_is_named(module: Slope, rows: Any, name: str) -> None:
    analyzer, logger = BottleneckAnalyzer(every_n_steps=2), MemoryLogger()
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)
    trainer_with(analyzer, logger=logger).fit(module, loader)
    assert [(finding["step"], finding["name"]) for finding in analyzer.history] == [(2, name), (4, name)]
    assert all(finding["seconds"][name] >= 0.05 for finding in analyzer.history)
    logged = [(step, row) for step, row in logger.rows if f"bottleneck/{name}" in row]
    assert [step for step, _ in logged] == [1, 3]
    for (_, row), finding in zip(logged, analyzer.history, strict=True):
        assert row[f"bottleneck/{name}"] == finding["share"] > 0.5
        assert sum(row.values()) == pytest.approx(1.0)


def test_findings_are_kept_in_checkpoints_and_in_the_run_log(tmp_path: Path) -> None:
    first = BottleneckAnalyzer(every_n_steps=2)
    trainer = trainer_with(first, RunReport(tmp_path))
    trainer.fit(SlowKernel(), batches_of([Meta(1, 10)] * 3))
    assert len(first.history) == 2  # the last step alone at the end
    logged = read_run(tmp_path).of("bottleneck")
    assert [line["figure"] for line in logged] == [finding["figure"] for finding in first.history]

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = BottleneckAnalyzer(every_n_steps=1)
    trainer_with(resumed, max_epochs=2).fit(SlowKernel(), batches_of([Meta(1, 10)]), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.history[:2] == first.history
    assert len(resumed.history) == 3


def test_a_failing_logger_is_reported_once_and_training_goes_on() -> None:
    class Failing(MemoryLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "bottleneck/data" in metrics:
                raise OSError("disk full")

    analyzer, module = BottleneckAnalyzer(every_n_steps=1), Slope()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(analyzer, logger=Failing()).fit(module, batches_of([Meta(1, 10)] * 3))
    assert len([w for w in caught if "BottleneckAnalyzer could not log to" in str(w.message)]) == 1
    assert len(module.gradients) == len(analyzer.history) == 3


def test_refuses_an_interval_below_one() -> None:
    with pytest.raises(ValueError, match="got 0"):
        BottleneckAnalyzer(every_n_steps=0)
