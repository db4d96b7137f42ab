"""Losses in RunReport's log and page; the rest of it is in test_run_report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_videoscale.callbacks import LossWeighting, RunReport
from lightning_videoscale.report.charts import number
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from tests.callbacks.test_run_report import data_in, records_of
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with
from tests.data.training import Witness


class Remembering(Witness):
    """Keeps the loss of every micro-batch, and learns, so that they differ."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_the_losses_are_means_over_samples_and_a_curve_of_the_page(tmp_path: Path) -> None:
    report, module = RunReport(tmp_path / "run", every_n_steps=2), Remembering()
    data = data_in(tmp_path, micro_batches=2, val_shards=str(tmp_path / "shards" / "*.tar"))
    callbacks = [report, LossWeighting()]
    trainer_with(*callbacks, accumulate_grad_batches=2, max_epochs=2, num_sanity_val_steps=1).fit(module, data)

    windows = records_of(tmp_path / "run", "window")
    weights = [meta.samples if meta.loss_weight else 0 for meta in module.metas]
    ends = [2 * window["step"] - 1 for window in windows]  # the last micro-batch counts in the next window
    for window, begin, end in zip(windows, [0, *ends], ends, strict=False):
        losses, counts = torch.tensor(module.seen[begin:end]), torch.tensor(weights[begin:end])
        assert window["loss"] == pytest.approx(float((losses * counts).sum() / counts.sum()), rel=1e-5)
    assert windows[0]["loss"] > 1.01 * windows[-1]["loss"] > 0

    validations = records_of(tmp_path / "run", "val_loss")
    assert [record["losses"].keys() for record in validations] == [{"val_loss"}] * 2  # the sanity check is none
    assert validations[0]["losses"]["val_loss"] > validations[1]["losses"]["val_loss"] > 0
    assert report.path is not None
    page = report.path.read_text()
    assert 'id="loss"' in page and number(windows[-1]["loss"]) in page and "val_loss" in page


class Diverging(Slope):
    """Its loss is finite in so many micro-batches."""

    def __init__(self, finite: int) -> None:
        super().__init__()
        self.finite = finite

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + (1.0 if batch_idx < self.finite else math.nan)


@pytest.mark.parametrize(("finite", "told"), [(3, [True, True, False, False]), (0, [False] * 4), (9, [True] * 4)])
def test_a_loss_that_is_nan_is_said_on_top(tmp_path: Path, finite: int, told: list[bool]) -> None:
    report = RunReport(tmp_path, every_n_steps=2)
    trainer_with(report).fit(Diverging(finite), batches_of([Meta(2, 10)] * 8))
    windows = records_of(tmp_path, "window")
    assert [window["loss_is_finite"] for window in windows] == told
    assert [window["loss"] is not None for window in windows] == told
    advice = {each.what: each.why for each in Findings(read_run(tmp_path)).advice}
    lost = told.count(False)
    why = f"It is so in {lost} of 4 records, first in the one up to step {2 * (5 - lost)}; the chart leaves them out."
    assert advice.get("Look into the loss: it is NaN or infinite") == (why if lost else None)
    assert report.path is not None and ("it is NaN" in report.path.read_text()) == bool(lost)


def test_a_module_that_returns_no_loss_has_no_curve(tmp_path: Path) -> None:
    report = RunReport(tmp_path, every_n_steps=1)
    trainer_with(report).fit(Manual(), batches_of([Meta(1, 10)] * 4))
    assert [window["loss"] for window in records_of(tmp_path, "window")] == [None] * 4
    assert report.path is not None and 'id="loss"' not in report.path.read_text()


class Manual(Slope):
    """Steps by itself, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward((self.slope * batch["x"]).mean())
        optimizer.step()  # type: ignore[union-attr]


def test_which_of_the_logged_losses_are_of_the_validation(tmp_path: Path) -> None:
    class Many(Slope):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            self.log_dict(dict.fromkeys(("interval_loss", "value_loss", "train/loss"), 1.0), batch_size=1)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.log_dict(
                dict.fromkeys(("val_loss", "eval/loss", "validation/flow_loss", "valLoss"), 2.0), batch_size=1
            )
            self.log("val_fvd", 3.0, batch_size=1)

    batches = batches_of([Meta(1, 10)] * 2)
    trainer_with(RunReport(tmp_path)).fit(Many(), batches, batches)
    [record] = records_of(tmp_path, "val_loss")
    assert record["losses"] == dict.fromkeys(("val_loss", "eval/loss", "validation/flow_loss", "valLoss"), 2.0)
