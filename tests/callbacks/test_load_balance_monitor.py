"""LoadBalanceMonitor in real Trainers on one process; tests/distributed has it on several."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, IterableDataset

from lightning_videoscale.callbacks import LoadBalanceMonitor
from lightning_videoscale.cost import TransformerFlops, training_flops
from lightning_videoscale.timing import unwatched
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with
from tests.models import tiny_wan

TIMES = {f"time/{name}" for name in ("compute", "data", "exchange", "reduction", "straggler", "optimizer")}


def test_logs_every_n_steps_and_the_rest_at_the_end() -> None:
    monitor, logger = LoadBalanceMonitor(every_n_steps=2), MemoryLogger()
    metas = [Meta(samples=2, sequence_length=10), Meta(1, 40), Meta(3, 5), Meta(1, 1), Meta(4, 100)]
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of(metas))

    assert [step for step, _ in logger.balance()] == [1, 3, 4]
    for _, row in logger.balance():
        assert row["balance/cv_step"] == 0.0 and row["balance/compute_cv"] == 0.0  # one rank is always balanced
        assert row["throughput/tokens_per_second"] > row["throughput/samples_per_second"] > 0
    summary = monitor.summary()
    assert summary["samples"] == 2 + 1 + 3 + 1 + 4
    assert summary["tokens"] == 20 + 40 + 15 + 1 + 400
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / monitor.metrics.sums["seconds"])
    assert (summary["cv_step"], summary["compute_cv"]) == (0.0, 0.0)


def test_takes_the_trainers_interval_and_counts_optimizer_steps() -> None:
    monitor, logger = LoadBalanceMonitor(), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, log_every_n_steps=2, accumulate_grad_batches=3)
    trainer.fit(Slope(), batches_of([Meta(1, 10)] * 12))
    assert [step for step, _ in logger.balance()] == [1, 3]
    assert monitor.metrics.sums["steps"] == 4
    assert monitor.metrics.sums["samples"] == 12


class TwoOptimizers(Slope):
    """Steps two optimizers in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward((self.slope * batch["x"]).mean())
            optimizer.step()
        return loss.detach()


def test_curves_line_up_with_those_of_self_log_under_two_optimizers() -> None:
    logger = MemoryLogger()
    trainer = trainer_with(LoadBalanceMonitor(every_n_steps=2), logger=logger, log_every_n_steps=1)
    trainer.fit(TwoOptimizers(), batches_of([Meta(2, 10)] * 5))
    assert [step for step, row in logger.rows if "loss" in row] == [0, 1, 2, 3, 4]
    assert [step for step, _ in logger.balance()] == [1, 3, 4]


def test_progress_bar_fields() -> None:
    trainer = trainer_with(LoadBalanceMonitor(every_n_steps=1))
    trainer.fit(Slope(), batches_of([Meta(1, 10)] * 2))
    assert trainer.progress_bar_metrics["cv_step"] == 0.0
    assert trainer.progress_bar_metrics["tokens/s"] > 0


def test_fillers_are_work_but_no_samples() -> None:
    monitor = LoadBalanceMonitor()
    trainer_with(monitor).fit(Slope(), batches_of([Meta(2, 10), Meta(1, 10, loss_weight=0.0)]))
    assert monitor.summary()["samples"] == 2
    assert monitor.summary()["tokens"] == 20
    assert monitor.metrics.sums["told_steps"] == 2


def test_without_meta_it_says_so_once_and_logs_cv_step_only() -> None:
    monitor, logger = LoadBalanceMonitor(every_n_steps=1), MemoryLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(monitor, logger=logger).fit(Slope(), batches_of([None, None, None]))
    assert len([w for w in caught if "LoadBalanceMonitor found no `meta`" in str(w.message)]) == 1
    assert [set(row) for _, row in logger.balance()] == [{"balance/cv_step"} | TIMES] * 3
    assert set(monitor.summary()) == {"cv_step"}


def test_a_failing_logger_is_reported_once_and_the_other_and_training_go_on() -> None:
    monitor, module = LoadBalanceMonitor(every_n_steps=1), Slope()
    failing, other = MemoryLogger(failing=True), MemoryLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(monitor, logger=[failing, other]).fit(module, batches_of([Meta(1, 10)] * 3))
    said = "could not log to MemoryLogger, training goes on: OSError('disk full')"
    assert len([w for w in caught if said in str(w.message)]) == 1
    assert len(other.balance()) == 3
    assert len(module.gradients) == 3
    assert monitor.metrics.sums["samples"] == 3


@pytest.mark.timed
def test_validation_is_not_timed() -> None:
    class SlowToValidate(Slope):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            time.sleep(0.3)

    monitor = LoadBalanceMonitor()
    trainer = trainer_with(monitor, val_check_interval=1)
    trainer.fit(SlowToValidate(), batches_of([Meta(1, 10)] * 3), batches_of([Meta(1, 10)]))
    assert 0 < monitor.metrics.sums["seconds"] < 0.6


class SlowToStart(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        time.sleep(0.3)
        yield {"x": torch.ones(1)}


@pytest.mark.timed
def test_the_start_of_its_loaders_and_sampling_before_it_are_not_timed_either() -> None:
    class Samples(Slope):
        def on_train_batch_end(self, *args: Any) -> None:
            with unwatched(self.trainer):
                time.sleep(0.1)

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            pass

    monitor, loader = LoadBalanceMonitor(), DataLoader(SlowToStart(), batch_size=None)
    trainer_with(monitor, val_check_interval=1).fit(Samples(), batches_of([Meta(1, 10)] * 3), loader)
    assert 0 < monitor.metrics.sums["seconds"] < 0.3


@pytest.mark.timed
def test_sampling_in_a_validation_is_not_timed_either() -> None:
    class Samples(Slope):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            time.sleep(0.2)
            with unwatched(self.trainer):
                time.sleep(0.01)
            time.sleep(0.2)

    monitor = LoadBalanceMonitor()
    trainer = trainer_with(monitor, val_check_interval=1)
    trainer.fit(Samples(), batches_of([Meta(1, 10)] * 3), batches_of([Meta(1, 10)]))
    assert 0 < monitor.metrics.sums["seconds"] < 0.4


@pytest.mark.timed
def test_the_time_of_a_step_is_told_apart() -> None:
    class Slow(Slope):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            time.sleep(0.15)

    logger = MemoryLogger()
    trainer_with(LoadBalanceMonitor(every_n_steps=3), logger=logger).fit(Slow(), batches_of([Meta(1, 10)] * 3))
    [(_, row)] = logger.balance()
    assert 0.05 <= row["time/compute"] < 0.1 <= 0.15 <= row["time/optimizer"]
    assert max(row["time/data"], row["time/reduction"], row["time/straggler"]) < 0.05 and row["time/exchange"] == 0.0


class Figures(MemoryLogger):
    """Takes figures, as TensorBoard's logger does."""

    def __init__(self, failing: bool = False) -> None:
        super().__init__()
        self.fails_to_draw = failing
        self.figures: list[tuple[str, int, Any]] = []

    @property
    def experiment(self) -> Figures:
        return self

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        if self.fails_to_draw:
            raise OSError("no canvas")
        self.figures.append((tag, step, figure))


def test_pictures_of_every_few_steps_and_of_the_rest() -> None:
    logger = Figures()
    monitor = LoadBalanceMonitor(every_n_steps=2, pictures_every_n_steps=3)
    trainer_with(monitor, logger=logger).fit(Slope(), batches_of([Meta(1, 10)] * 5))
    names = ["balance/ranks", "balance/cv_step_histogram"]
    assert [figure[:2] for figure in logger.figures] == [(name, step) for step in (3, 4) for name in names]
    ranks, histogram = logger.figures[0][2], logger.figures[1][2]
    compute, wait = (axis.images[0].get_array() for axis in ranks.axes[:2])
    assert compute.shape == wait.shape == (1, 4)  # one rank, steps 0 to 3
    assert ranks.axes[0].images[0].get_extent() == [-0.5, 3.5, 0.5, -0.5]
    assert sum(bar.get_height() for bar in histogram.axes[0].patches) == 4


def test_a_failing_canvas_is_reported_once_and_training_goes_on() -> None:
    monitor, module = LoadBalanceMonitor(every_n_steps=1, pictures_every_n_steps=1), Slope()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(monitor, logger=Figures(failing=True)).fit(module, batches_of([Meta(1, 10)] * 3))
    assert len([w for w in caught if "OSError('no canvas')" in str(w.message)]) == 1
    assert len(module.gradients) == monitor.metrics.sums["samples"] == 3


def test_tensorboard_gets_pictures(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer_with(LoadBalanceMonitor(every_n_steps=2), logger=logger).fit(Slope(), batches_of([Meta(1, 10)] * 3))
    events = EventAccumulator(logger.log_dir).Reload()
    assert events.Tags()["images"] == ["balance/ranks", "balance/cv_step_histogram"]
    [image] = events.Images("balance/ranks")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 500


def test_the_figures_of_the_run_go_on_in_a_resumed_one(tmp_path: Path) -> None:
    first = LoadBalanceMonitor(every_n_steps=1)
    trainer = trainer_with(first)
    trainer.fit(Slope(), batches_of([Meta(2, 10)] * 3))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = LoadBalanceMonitor(every_n_steps=1)
    trainer = trainer_with(resumed, max_epochs=2)
    trainer.fit(Slope(), batches_of([Meta(2, 10)] * 3), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.summary()["samples"] == 2 * first.summary()["samples"] == 12
    assert resumed.metrics.sums["steps"] == 6


def test_the_mfu_is_that_of_the_transformer_that_trains() -> None:
    class WithWan(Slope):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, tiny_wan())

    monitor = LoadBalanceMonitor(peak_flops_per_second=1e9)
    trainer_with(monitor).fit(WithWan("transformer"), batches_of([Meta(2, 10)] * 2))
    flops = training_flops(TransformerFlops(layers=2, width=48, ffn_width=64), 4, 10)
    assert monitor.summary()["mfu"] == pytest.approx(flops / (monitor.metrics.sums["seconds"] * 1e9))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = LoadBalanceMonitor(peak_flops_per_second=1e9)
        trainer_with(monitor).fit(WithWan("first", "second"), batches_of([Meta(2, 10)]))
    assert "mfu" not in monitor.summary() and "samples" in monitor.summary()
    assert any("found first, second." in str(warning.message) for warning in caught)


def test_refuses_an_interval_below_one() -> None:
    with pytest.raises(ValueError, match="got 0"):
        LoadBalanceMonitor(every_n_steps=0)


def test_refuses_an_unknown_geometry() -> None:
    with pytest.raises(ValueError, match="geometry='wan9'"):
        LoadBalanceMonitor(geometry="wan9")
