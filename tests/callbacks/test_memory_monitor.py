"""MemoryMonitor's windows, points and failures, on scripted statistics; tests/gpu has the device's own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_videoscale.callbacks import MemoryMonitor
from lightning_videoscale.callbacks.device_memory import DeviceMemory, MemoryGauge
from lightning_videoscale.cost import BucketBudget, MemoryModel
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.timing import unwatched
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with
from tests.data.clips import write_shards
from tests.data.training import Witness

GIB = 2**30


class ScriptedGauge(MemoryGauge):
    """Hands out one peak per reading, of a device of 1000 GiB; an exception instead of a peak is raised."""

    def __init__(self, peaks: Sequence[float | Exception]) -> None:
        super().__init__(torch.device("cpu"))
        self.peaks = list(peaks)
        self.resets = 0

    def read(self) -> DeviceMemory:
        peak = self.peaks.pop(0)
        if isinstance(peak, Exception):
            raise peak
        return DeviceMemory(100 * GIB, 800 * GIB, peak * GIB, 80 * GIB, 1000 * GIB)

    def reset_peak(self) -> None:
        self.resets += 1


class Scripted(MemoryMonitor):
    def __init__(self, peaks: Sequence[float | Exception], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scripted_gauge = ScriptedGauge(peaks)

    def gauge_of(self, device: torch.device) -> MemoryGauge:
        return self.scripted_gauge


class Validated(Slope):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        pass


def _rows(logger: MemoryLogger) -> list[tuple[int | None, dict[str, float]]]:
    return [(step, row) for step, row in logger.rows if "memory/peak_gib" in row]


def _said(caught: list[warnings.WarningMessage], words: str) -> int:
    return len([w for w in caught if words in str(w.message)])


def test_reports_every_n_optimizer_steps_and_the_rest_at_the_end() -> None:
    monitor, logger = Scripted([300, 200, 250], every_n_steps=2), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, accumulate_grad_batches=2)
    trainer.fit(Slope(), batches_of([Meta(1, 10)] * 10))
    assert [(step, row["memory/peak_gib"]) for step, row in _rows(logger)] == [(1, 300), (3, 200), (4, 250)]
    first = _rows(logger)[0][1]
    assert (first["memory/allocated_gib"], first["memory/reserved_gib"], first["memory/fragmentation"]) == (
        100,
        800,
        0.1,
    )
    assert monitor.scripted_gauge.resets == 1 + 3
    assert monitor.peak_bytes == 300 * GIB


def test_headroom_by_a_given_model_counts_the_largest_micro_batch() -> None:
    model = MemoryModel(fixed=150 * GIB, per_token=2 * GIB, worst_excess=0.0)
    monitor, logger = Scripted([300], every_n_steps=2, memory_model=model), MemoryLogger()
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(3, 100), Meta(1, 50)]))
    # 5 % of 1000 stay free: (950 - 150) / 2 = 400 tokens fit.
    assert _rows(logger)[0][1]["memory/headroom_tokens"] == 100
    assert _rows(logger)[0][1]["memory/fits_tokens"] == 400


def test_what_samples_take_beside_their_tokens_is_no_headroom() -> None:
    model = MemoryModel(fixed=150 * GIB, per_token=2 * GIB, worst_excess=0.0, per_sample=20 * GIB)
    monitor, logger = Scripted([300], every_n_steps=2, memory_model=model), MemoryLogger()
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(10, 30), Meta(1, 350)]))
    assert _rows(logger)[0][1]["memory/headroom_tokens"] == 0  # 10 samples of 30 tokens and as much as 10 more


def test_a_micro_batch_that_is_too_large_has_negative_headroom() -> None:
    model = MemoryModel(fixed=150 * GIB, per_token=2 * GIB, worst_excess=0.0)
    monitor, logger = Scripted([300], memory_model=model), MemoryLogger()
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(1, 425)]))
    assert _rows(logger)[0][1]["memory/headroom_tokens"] == -25


def test_a_gpu_without_room_for_a_token_has_negative_headroom() -> None:
    model = MemoryModel(fixed=960 * GIB, per_token=GIB, worst_excess=0.0)
    monitor, logger = Scripted([990], memory_model=model), MemoryLogger()
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(1, 30)]))
    row = _rows(logger)[0][1]
    assert (row["memory/fits_tokens"], row["memory/headroom_tokens"]) == (0, -30)


def test_headroom_by_a_line_through_what_was_observed() -> None:
    monitor, logger = Scripted([150, 200, 350, 140], every_n_steps=1), MemoryLogger()
    metas = [Meta(1, 50), Meta(1, 100), Meta(5, 50), Meta(1, 50)]  # 100 GiB and one per token
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of(metas))
    headrooms = [row.get("memory/headroom_tokens") for _, row in _rows(logger)]
    assert headrooms[:2] == [None, None]
    assert headrooms[2:] == [pytest.approx(850 - 250, abs=1), pytest.approx(850 - 50, abs=1)]
    assert monitor.peaks == {50: 150 * GIB, 100: 200 * GIB, 250: 350 * GIB}


def test_validation_is_no_training_peak() -> None:
    # Validation follows both steps of a window: the peak before it counts, and is reset after it.
    monitor, logger = Scripted([300, 200, 100], every_n_steps=2), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, val_check_interval=1, limit_val_batches=1, max_steps=2)
    trainer.fit(Validated(), batches_of([Meta(1, 10)] * 2), batches_of([Meta(1, 10)]))
    assert [row["memory/peak_gib"] for _, row in _rows(logger)] == [300]
    assert monitor.scripted_gauge.resets == 1 + 2 + 1


def test_sampling_in_a_validation_is_no_training_peak() -> None:
    class Samples(Slope):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            with unwatched(self.trainer):
                pass

    # One reading before each validation and one for the report: none while it validates.
    monitor, logger = Scripted([300, 200, 100], every_n_steps=2), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, val_check_interval=1, limit_val_batches=1, max_steps=2)
    trainer.fit(Samples(), batches_of([Meta(1, 10)] * 2), batches_of([Meta(1, 10)]))
    assert [row["memory/peak_gib"] for _, row in _rows(logger)] == [300]
    assert not monitor.scripted_gauge.peaks and monitor.scripted_gauge.resets == 1 + 2 + 1


def test_points_survive_a_restart_on_the_same_machine_only(tmp_path: Path) -> None:
    first = Scripted([150, 200], every_n_steps=1)
    trainer = trainer_with(first)
    trainer.fit(Slope(), batches_of([Meta(1, 50), Meta(1, 100)]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["Scripted"]

    resumed, logger = Scripted([350], every_n_steps=1), MemoryLogger()
    trainer = trainer_with(resumed, logger=logger, max_epochs=2)
    trainer.fit(Slope(), batches_of([Meta(1, 250)]), ckpt_path=tmp_path / "last.ckpt")
    assert set(resumed.peaks) == {50, 100, 250}
    assert "memory/headroom_tokens" in _rows(logger)[0][1]

    elsewhere = Scripted([150], every_n_steps=1)
    elsewhere.load_state_dict(state | {"machine": ("another GPU", 8, 2)})
    with pytest.warns(match=r"\('another GPU', 8, 2\).*\('cpu', 1, 1\)"):
        trainer_with(elsewhere).fit(Slope(), batches_of([Meta(1, 30)]))
    assert elsewhere.peaks == {30: 150 * GIB}


def test_tokens_are_those_that_the_budget_counts(tmp_path: Path) -> None:
    """Peaks of (3 S + 90) GiB for every sample: a line over B * S would take text for tokens, and M_mem is of both."""
    shards, budget = write_shards(tmp_path / "train", 40), BucketBudget(400, 1e6, overhead_tokens=30.0)
    module = Witness()

    class OfSamples(Scripted):
        def _read(self, gauge: MemoryGauge) -> DeviceMemory:
            meta = module.metas[-1]
            self.scripted_gauge.peaks = [3 * meta.samples * (meta.sequence_length + 30)]
            return super()._read(gauge)

    monitor, logger = OfSamples([], every_n_steps=1), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, enable_checkpointing=False)
    trainer.fit(module, VideoDataModule(shards, budget=budget))
    _, row = _rows(logger)[-1]
    assert row["memory/fits_tokens"] == pytest.approx(950 / 3, abs=1) and row["memory/overhead_tokens"] == 30
    last = module.metas[-1]
    taken = last.samples * (last.sequence_length + 30)
    assert row["memory/headroom_tokens"] == row["memory/fits_tokens"] - taken

    again = OfSamples([], every_n_steps=1)
    again.load_state_dict(monitor.state_dict())
    with pytest.warns(match="as 30 tokens more.* as 0 more"):
        trainer_with(again, max_steps=1).fit(module, VideoDataModule(shards, budget=BucketBudget(400, 1e6)))
    assert len(again.peaks) == 1


def test_failures_are_said_once_and_training_goes_on() -> None:
    class FullDisk(MemoryLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "memory/peak_gib" in metrics:
                raise OSError("disk full")

    monitor, module = Scripted([RuntimeError("lost"), RuntimeError("lost"), 300, 300], every_n_steps=1), Slope()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(monitor, logger=FullDisk()).fit(module, batches_of([Meta(1, 10)] * 4))
    assert len(module.gradients) == 4
    assert _said(caught, "could not read the memory, training goes on: RuntimeError('lost')") == 1
    assert _said(caught, "could not log to FullDisk, training goes on: OSError('disk full')") == 1
    assert monitor.peak_bytes == 300 * GIB


def test_peaks_that_do_not_grow_leave_the_other_figures() -> None:
    monitor, logger = Scripted([300, 200, 100, 90], every_n_steps=1), MemoryLogger()
    with pytest.warns(match="headroom"):
        trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(1, s) for s in (10, 20, 30, 40)]))
    assert [row["memory/peak_gib"] for _, row in _rows(logger)] == [300, 200, 100, 90]


def test_without_meta_there_is_no_headroom() -> None:
    monitor, logger = Scripted([300, 300], every_n_steps=1), MemoryLogger()
    with pytest.warns(match="`meta`"):
        trainer_with(monitor, logger=logger).fit(Slope(), batches_of([None, None]))
    assert len(_rows(logger)) == 2 and monitor.peaks == {}


def test_on_a_cpu_it_says_so_once_and_logs_nothing() -> None:
    monitor, logger = MemoryMonitor(every_n_steps=1), MemoryLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(1, 10)] * 3))
    assert _said(caught, "reads the memory of CUDA devices; on cpu it logs nothing") == 1
    assert _rows(logger) == []


def test_refuses_an_empty_window() -> None:
    with pytest.raises(ValueError, match="got 0"):
        MemoryMonitor(every_n_steps=0)
