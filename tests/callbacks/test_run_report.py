"""RunReport in real Trainers on real shards; tests/distributed has it on two ranks, tests/report the page itself."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_videoscale.callbacks import (
    BottleneckAnalyzer,
    BudgetRecalibrator,
    FusedKernels,
    LossWeighting,
    RunReport,
)
from lightning_videoscale.callbacks.run_folder import run_folder
from lightning_videoscale.cli import main
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.report import LOG_NAME, record
from lightning_videoscale.report.charts import number
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from tests.callbacks.test_memory_monitor import Scripted
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with
from tests.data.clips import clip, npy, write_shard, write_shards
from tests.data.training import Witness
from tests.distributed.forking import forking
from tests.report.test_page import read_page

SAMPLES = 50
BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)


def data_in(folder: Path, **settings: Any) -> VideoDataModule:
    return VideoDataModule(write_shards(folder / "shards", SAMPLES), budget=BUDGET, **settings)


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / LOG_NAME).read_text().splitlines()
    return [row for row in map(json.loads, filter(None, lines)) if row["kind"] == kind]


def test_a_training_leaves_a_report_with_the_numbers_of_what_it_saw(tmp_path: Path) -> None:
    report, module = RunReport(tmp_path / "run", every_n_steps=2), Witness()
    callbacks = [report, LossWeighting(), FusedKernels()]
    trainer = trainer_with(*callbacks, accumulate_grad_batches=2, max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is nothing to fuse
        trainer.fit(module, data_in(tmp_path, micro_batches=2))

    windows = records_of(tmp_path / "run", "window")
    assert sum(window["steps"] for window in windows) == trainer.global_step
    assert [window["step"] for window in windows[:2]] == [2, 4]
    assert sum(window["samples"] for window in windows) == 2 * SAMPLES
    counted = [meta for meta in module.metas if meta.loss_weight]
    assert sum(window["tokens"] for window in windows) == sum(m.samples * m.sequence_length for m in counted)
    seen = sorted((m.frames, m.height, m.width, m.sequence_length, m.samples) for m in module.metas)
    assert seen == sorted(tuple(b[:5]) for w in windows for b in w["batches"] for _ in range(b[5]))
    assert all(window["seconds"] >= window["slowest_seconds"] > 0 for window in windows)

    [plan] = records_of(tmp_path / "run", "plan")
    assert plan["budget"] == {"m_mem": 160, "m_comp": 160 * 80, "p": 2.0} and plan["balance"] == "planned"
    [start], [end] = records_of(tmp_path / "run", "start"), records_of(tmp_path / "run", "end")
    assert start["callbacks"] == ["RunReport", "LossWeighting", "FusedKernels"] and end["status"] == "completed"
    [injection] = records_of(tmp_path / "run", "injection")
    assert injection["replaced"] == [] and injection["model"] == "Witness"

    assert report.path == tmp_path / "run" / "report.html"
    page = read_page(report.path)
    rate = sum(w["tokens"] for w in windows) / sum(w["seconds"] for w in windows)
    assert page.text["dd"][0] == number(rate)
    assert any("One data-parallel rank" in heading for heading in page.text["h1"])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_out_and_what_workers_do_is_in_the_report(tmp_path: Path, workers: int) -> None:
    clips = [clip(i, mask_npy=npy(np.ones(2)) if i not in (3, 8) else b"") for i in range(12)]
    shard = write_shard(tmp_path / "shards" / "000.tar", [*clips, {"__key__": "odd", "latents.npy": b"no array"}])
    report = RunReport(tmp_path / "run", every_n_steps=2)
    data = VideoDataModule(str(shard), budget=BUDGET, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_with(report, LossWeighting(), max_epochs=2).fit(Witness(), data)
    [samples] = records_of(tmp_path / "run", "samples")
    assert (samples["indexed"], samples["refused"], samples["too_small"]) == (12, 1, 0)
    assert samples["first_refused"][0][:2] == ["000.tar", "odd.latents.npy"]
    loading = records_of(tmp_path / "run", "loading")
    rows = [worker for record in loading for worker in record["workers"][0]]
    assert sum(row[0] for row in rows) == 2 * 10 and sum(row[1] for row in rows) == 2 * 2
    assert {len(record["workers"][0]) for record in loading} == {max(workers, 1)}
    named = sorted(row[0] for record in loading for row in record["left_out"])
    assert named == ["000.tar/clip00003", "000.tar/clip00008"], "each once"
    assert report.path is not None
    page = read_page(report.path)
    assert {"loading", "left-out"} <= {value for _, name, value in page.attributes if name == "id"}
    assert {"000.tar/clip00003", "000.tar/clip00008", "000.tar: odd.latents.npy"} <= set(page.text["th"])
    assert {"1 member", "4 samples"} <= set(page.text["strong"])
    assert str(tmp_path) not in (tmp_path / "run" / LOG_NAME).read_text(), "no addresses of shards"


class Dying(Witness):
    """Is killed in its fifth step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def _train_until_killed(folder: Path) -> None:
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    callbacks = [RunReport(folder, every_n_steps=2), LossWeighting(), checkpoints]
    trainer_with(*callbacks, enable_checkpointing=True).fit(Dying(), data_in(folder))


def test_after_a_kill_the_command_draws_what_was_logged_and_a_resumed_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = forking().Process(target=_train_until_killed, args=(tmp_path,))
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    with (tmp_path / LOG_NAME).open("a") as log:
        log.write('{"v": 1, "kind": "win')  # as a kill while writing leaves it
    assert not (tmp_path / "report.html").exists()

    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = read_page(tmp_path / "report.html")
    assert "unfinished" in page.text["span"]
    assert any("cannot be read" in note for note in page.text["li"])
    assert any(text.startswith("4 steps in ") for text in page.text["p"])

    callbacks = [RunReport(tmp_path, every_n_steps=2), LossWeighting()]
    trainer = trainer_with(*callbacks, max_steps=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Witness(), data_in(tmp_path), ckpt_path=str(tmp_path / "step=3.ckpt"))
    page = read_page(tmp_path / "report.html")
    # Window 3-4 was repeated from step 3 on: 2 steps before, 4 after.
    assert any(text.startswith("6 steps in ") for text in page.text["p"])
    assert any("1 steps after step 3" in note for note in page.text["li"])
    assert "completed" in page.text["span"]


class Failing(Slope):
    """Raises in its third step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise RuntimeError("<the disk> is full")
        return super().training_step(batch, batch_idx)


def test_an_exception_leaves_a_report_that_names_it(tmp_path: Path) -> None:
    report = RunReport(tmp_path, every_n_steps=1)
    with pytest.raises(RuntimeError, match="is full"):
        trainer_with(report).fit(Failing(), batches_of([Meta(1, 10)] * 4))
    [end] = records_of(tmp_path, "end")
    assert end["status"] == "failed" and end["error"] == "RuntimeError('<the disk> is full')"
    assert [window["step"] for window in records_of(tmp_path, "window")] == [1, 2]
    assert report.path is not None and "failed" in read_page(report.path).text["span"]


def test_a_last_checkpoint_that_cannot_be_written_leaves_a_report(tmp_path: Path) -> None:
    class FullDisk(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise OSError("No space left")

    report = RunReport(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        trainer_with(report, FullDisk()).fit(Slope(), batches_of([Meta(1, 10)] * 2))
    [end] = records_of(tmp_path, "end")
    assert end["status"] == "failed" and end["error"] == "OSError('No space left')"
    assert report.path is not None and report.path.exists()


def test_what_fails_after_or_without_a_training_is_not_of_the_run(tmp_path: Path) -> None:
    class FailsInTest(Slope):
        def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            raise RuntimeError("no test")

    trainer, module = trainer_with(RunReport(tmp_path)), FailsInTest()
    trainer.fit(module, batches_of([Meta(1, 10)] * 2))
    with pytest.raises(RuntimeError, match="no test"):
        trainer.test(module, batches_of([Meta(1, 10)]), verbose=False)
    assert [end["status"] for end in records_of(tmp_path, "end")] == ["completed"]


def test_a_run_that_was_asked_to_end_has_not_failed(tmp_path: Path) -> None:
    class Preempted(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            raise SIGTERMException(143)  # as Lightning and our strategies do after SIGTERM

    with pytest.raises(SIGTERMException):
        trainer_with(RunReport(tmp_path), Preempted()).fit(Slope(), batches_of([Meta(1, 10)] * 2))
    [end] = records_of(tmp_path, "end")
    assert end["status"] == "interrupted" and end["error"] == "SIGTERMException(143)"
    assert Findings(read_run(tmp_path)).advice == []


def test_every_callback_fills_its_section(tmp_path: Path) -> None:
    recalibrator, analyzer = BudgetRecalibrator(every_n_steps=2), BottleneckAnalyzer(every_n_steps=4)
    report = RunReport(tmp_path / "run", every_n_steps=2)
    memory = Scripted([300.0 + n for n in range(20)], every_n_steps=2)
    callbacks = [memory, analyzer, recalibrator, report, LossWeighting()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_with(*callbacks, max_epochs=2).fit(Witness(), data_in(tmp_path))
    bottlenecks = records_of(tmp_path / "run", "bottleneck")
    assert [found["name"] for found in bottlenecks] == [found["name"] for found in analyzer.history]
    adopted = [row for row in records_of(tmp_path / "run", "budget") if row["adopted"]]
    assert [row["m_comp"] for row in adopted] == [change["m_comp"] for change in recalibrator.history]
    peaks = [row["peak_gib"] for row in records_of(tmp_path / "run", "memory")]
    assert len(peaks) > 2 and max(peaks) == memory.peak_bytes / 2**30
    assert report.path is not None
    ids = {value for _, name, value in read_page(report.path).attributes if name == "id"}
    assert {"bottlenecks", "recalibration", "memory", "buckets"} <= ids
    # The plans follow the budgets: the first is the user's, the last the recalibrator's.
    plans = records_of(tmp_path / "run", "plan")
    assert plans[0]["budget"]["m_comp"] == 160 * 80
    followed = [plan["budget"]["m_comp"] for plan in plans[1:]]
    assert followed == [row["m_comp"] for row in adopted][: len(followed)]
    assert len(followed) >= len(adopted) - 1  # what is adopted with the last step plans nothing any more


def test_without_meta_times_are_reported_all_the_same(tmp_path: Path) -> None:
    trainer_with(RunReport(tmp_path)).fit(Slope(), batches_of([None] * 3))
    [window] = records_of(tmp_path, "window")
    assert window["steps"] == 3 and window["tokens"] is None and window["batches"] == []
    assert "Train with VideoDataModule." in read_page(tmp_path / "report.html").text["li"]


class WandbLike(MemoryLogger):
    """A logger whose folder many runs share, as W&B's is, and which has no files of its own."""

    @property
    def save_dir(self) -> str | None:
        return None


@pytest.mark.parametrize("kind", ["tensorboard", "csv", "wandb-like", "failing", "none"])
def test_any_logger(tmp_path: Path, kind: str) -> None:
    loggers: dict[str, Any] = {
        "tensorboard": lambda: TensorBoardLogger(str(tmp_path)),
        "csv": lambda: CSVLogger(str(tmp_path)),
        "wandb-like": WandbLike,
        "failing": lambda: MemoryLogger(failing=True),
        "none": lambda: False,
    }
    report = RunReport(every_n_steps=1)
    trainer = trainer_with(report, logger=loggers[kind](), default_root_dir=str(tmp_path))
    trainer.fit(Slope(), batches_of([Meta(1, 10)] * 2))
    named = {"wandb-like": "memory", "failing": "memory"}.get(kind, "lightning_logs")
    folder = tmp_path if kind == "none" else tmp_path / named / "version_0"
    assert report.path == folder / "report.html" and report.path.exists()


@pytest.mark.parametrize("folder", [None, "mine"])
def test_a_fast_dev_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    report = RunReport(folder, every_n_steps=1)
    for settings in ({}, {"fast_dev_run": 2}):  # the log of an earlier run is none of this one's
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        trainer_with(report, **settings).fit(Slope(), batches_of([Meta(1, 10)] * 3))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert len(before) == 2 and report.run_log is None


def test_lightnings_monitors_work_beside_it(tmp_path: Path) -> None:
    class TwoRates(Slope):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]), window_size=2)
    monitors: list[pl.Callback] = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True), throughput]
    logger = MemoryLogger()
    trainer = trainer_with(*monitors, RunReport(tmp_path, every_n_steps=2), logger=logger, log_every_n_steps=1)
    trainer.fit(TwoRates(), batches_of([Meta(2, 10)] * 6))
    logged = {name for _, row in logger.rows for name in row}
    assert {"lr-SGD", "train/device/samples_per_sec"} <= logged
    assert any("DeviceStatsMonitor" in name for name in logged)
    assert len(records_of(tmp_path, "window")) == 3


def test_nothing_that_goes_wrong_stops_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("no")

    for name in ("start_record", "window_record", "write_report"):
        monkeypatch.setattr(f"lightning_videoscale.callbacks.run_report.{name}", broken)
    module, report = Slope(), RunReport(tmp_path, every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(report).fit(module, batches_of([Meta(1, 10)] * 3))
    said = [str(w.message) for w in caught if "ArithmeticError('no')" in str(w.message)]
    assert [message.split(",")[0] for message in said] == [
        "RunReport could not describe the run",
        "RunReport could not record",
        "RunReport could not draw the report",
    ]
    assert len(module.gradients) == 3 and report.path is None


def test_a_callback_of_yours_records_too(tmp_path: Path) -> None:
    class Recording(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            record(trainer, "mine", {"figure": torch.tensor(3).item()})

    trainer_with(Recording(), RunReport(tmp_path)).fit(Slope(), batches_of([Meta(1, 10)]))
    assert [row["figure"] for row in records_of(tmp_path, "mine")] == [3]
    trainer_with(Recording()).fit(Slope(), batches_of([Meta(1, 10)]))  # nobody keeps a log: nothing happens


def test_refuses_an_interval_below_one() -> None:
    with pytest.raises(ValueError, match="got 0"):
        RunReport(every_n_steps=0)


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=CSVLogger("~/logs", name="run", version="a"))
    assert run_folder(trainer) == tmp_path / "logs" / "run" / "a"
    assert RunReport("~/mine").folder == tmp_path / "mine"


@pytest.mark.parametrize("folder", ["s3://bucket/run", Path("s3://bucket/run")])
def test_a_folder_that_is_a_url_is_refused(folder: str | Path) -> None:
    with pytest.raises(ValueError, match="s3:/"):
        RunReport(folder)


def test_of_a_remote_root_the_report_is_local_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir="memory://bucket/run")
    with pytest.warns(UserWarning, match="it goes to"):
        assert run_folder(trainer) == tmp_path / "bucket" / "run"
