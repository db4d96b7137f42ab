"""benchmark_shapes with a tiny Wan in real Trainers: what it measures, and that nothing is left of it."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

import lightning_videoscale as vs
from lightning_videoscale.callbacks.budget_recalibrator import observations_of
from lightning_videoscale.cost import BucketBudget, ShapeMatrix
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.cost.benchmark.trainer_steps import RealSteps, real_steps
from lightning_videoscale.data import RandomBatches, VideoDataModule
from lightning_videoscale.parallel import CollectiveTransport
from lightning_videoscale.timing import StepWindow, subscribe_to_steps
from tests.cost.benchmark.flow import SHAPES, Flow, Small
from tests.data.clips import clip, npy, write_shard
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
BUDGET = BucketBudget(160, 160 * 80)


def _benchmark(module: pl.LightningModule, trainer: pl.Trainer | None = None, **settings: Any) -> ShapeMatrix:
    trainer = trainer if trainer is not None else trainer_with()
    settings = {"batches": RandomBatches(4), "max_tokens": 96, "seconds": 1e-9, "progress": False} | settings
    return vs.benchmark_shapes(trainer, module, settings.pop("shapes", SHAPES), **settings)


class Watching(pl.Callback):
    """Notes what it is told of training steps."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.told.append("start")

    def on_before_backward(self, *_: Any) -> None:
        self.told.append("backward")


def test_every_cell_is_measured_and_kept(tmp_path: Path) -> None:
    matrix = _benchmark(Flow(), seconds=0.02)
    cells = [(row.sequence_length, row.samples) for row in matrix.rows]
    assert cells == [(4, 1), (4, 4), (16, 1), (48, 1), (80, 1), (4, 24), (16, 6), (48, 2)]
    assert all(row.outcome == "measured" and row.seconds and row.spread is not None for row in matrix.rows)
    assert matrix.provenance["strategy"] == "SingleDeviceStrategy"
    assert matrix.provenance["module"].endswith("Flow") and matrix.provenance["precision"] == "32-true"

    matrix.save(tmp_path / "matrix.json")
    kept = ShapeMatrix.load(tmp_path / "matrix.json")
    assert kept == matrix and [m[:2] for m in kept.measurements] == [(b, s) for s, b in cells]
    assert matrix.capacity_bytes is None and all(row.peak_bytes is None for row in matrix.rows)


class ByGraphs(SingleDeviceStrategy):
    """Says of the first steps of a shape that they ran eagerly, and of all later ones that they were replayed."""

    graph_mode, steps_until_graphs = "auto", 2

    def __init__(self) -> None:
        super().__init__("cpu")
        self.counts: Counter[str] = Counter(bytes=0)
        self.shapes: Counter[torch.Size] = Counter()

    def describe_graphs(self) -> dict[str, int]:
        return dict(self.counts)

    def training_step(self, batch: Any, *args: Any) -> Any:
        shape = batch["latents"].shape
        self.shapes[shape] += 1
        never = shape[2] == 5
        self.counts["eager" if never or self.shapes[shape] <= 2 else "replayed"] += 1
        return super().training_step(batch, *args)


def test_what_runs_by_graphs_is_timed_when_it_does(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        strategy=ByGraphs(), logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1
    )
    matrix = _benchmark(Flow(), trainer)
    assert {row.by_graph for row in matrix.rows if row.frames < 5} == {True}
    assert {row.by_graph for row in matrix.rows if row.frames == 5} == {False}
    matrix.save(tmp_path / "matrix.json")
    kept = ShapeMatrix.load(tmp_path / "matrix.json")
    assert kept == matrix and [m.by_graph for m in kept.measurements] == [row.by_graph for row in matrix.rows]

    without = _benchmark(Flow())
    assert not any(row.by_graph for row in without.rows)
    assert without.differences(matrix.provenance, ["graphs"]) == ["graphs: None measured, 'auto' now"]


@pytest.mark.timed
def test_what_disturbed_a_cell_is_forgotten_when_it_is_measured_once_more() -> None:
    """The host is busy with something else while a shape is measured for the first time."""

    class Disturbed(Flow):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            if batch["meta"].sequence_length == 48:
                self.steps += 1
                if 2 <= self.steps <= 3:  # the two that count, after one that does not
                    time.sleep(0.4 + 0.2 * (self.steps % 2))
            return super().training_step(batch, batch_idx)

    module = Disturbed()
    (row, *_) = (r for r in _benchmark(module, shapes=SHAPES[2:], max_tokens=48).rows if r.sequence_length == 48)
    assert row.seconds < 0.2


def test_from_a_folder_of_sources_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "lightning-videoscale":
            raise PackageNotFoundError(package)
        return "2.0"

    monkeypatch.setattr("lightning_videoscale.compat.names.version", version)
    provenance = _benchmark(Flow(), shapes=SHAPES[:2], max_tokens=16).provenance
    assert provenance["lightning-videoscale"] is None and provenance["torch"] == "2.0"


def test_nothing_is_trained_logged_or_drawn(tmp_path: Path) -> None:
    module, watching = Flow(), Watching()
    before = copy.deepcopy(module.state_dict())
    logger = CSVLogger(tmp_path)
    trainer = trainer_with(logger=logger, enable_checkpointing=True, callbacks=[watching, ModelCheckpoint(tmp_path)])
    callbacks = list(trainer.callbacks)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    draws = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    _benchmark(module, trainer)

    after = module.state_dict()
    assert all(torch.equal(after[name].cpu(), value) for name, value in before.items())
    assert all(p.grad is None for p in module.parameters())
    assert [part.training for part in module.modules()] == [part.training for part in Flow().modules()]
    assert (torch.equal(torch.get_rng_state(), draws[0])) and random.getstate() == draws[1]
    assert np.random.get_state()[1].tolist() == draws[2]
    assert not watching.told and trainer.callbacks == callbacks and trainer.loggers == [logger]
    assert trainer.global_step == 0 and not list(tmp_path.iterdir())


class Summary(pl.Callback):
    """Says at the end how long training took, as users' callbacks do."""

    def on_train_start(self, *_: Any) -> None:
        self.start = 0.0

    def on_fit_end(self, *_: Any) -> None:
        self.seconds = 1.0 - self.start


def test_callbacks_that_sum_up_a_training_do_not_fail_a_benchmark(tmp_path: Path) -> None:
    summary = Summary()
    trainer = trainer_with(callbacks=[summary, vs.callbacks.RunReport()], default_root_dir=tmp_path)
    callbacks = list(trainer.callbacks)
    with pytest.warns(UserWarning, match=r"Summary.on_fit_end.*no attribute 'start'") as w:
        assert _benchmark(Flow(), trainer, shapes=SHAPES[:1]).rows
    assert not [str(warned.message) for warned in w if "RunReport" in str(warned.message)]
    assert not list(tmp_path.iterdir()) and trainer.callbacks == callbacks and "on_fit_end" not in vars(summary)


def test_training_after_a_benchmark_is_training_without_one(tmp_path: Path) -> None:
    data = str(write_shard(tmp_path / "000.tar", [clip(i) for i in range(6)]))
    losses = []
    for is_benchmarked in (False, True):
        module, trainer = Flow(), trainer_with(max_epochs=1)
        if is_benchmarked:
            _benchmark(module, trainer)
        pl.seed_everything(5, verbose=False)
        trainer.fit(module, VideoDataModule(data, budget=BUDGET))
        losses.append([*(p.detach().clone() for p in module.parameters()), trainer.callback_metrics["mean"]])
        assert trainer.global_step == 2
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_optimizers_have_their_states_while_it_is_measured_and_not_after() -> None:
    class Noting(Flow):
        def __init__(self) -> None:
            super().__init__()
            self.states: list[int] = []

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            self.states.append(len(self.optimizers().optimizer.state))
            return super().training_step(batch, batch_idx)

    module, trainer = Noting(), trainer_with()
    _benchmark(module, trainer)
    trained = sum(p.requires_grad for p in module.parameters())
    assert module.states[0] == 0 and set(module.states[1:]) == {trained}
    assert not trainer.optimizers[0].state and trainer.optimizers[0].param_groups[0]["lr"] == 1e-2


def test_batches_of_the_data_have_all_members(tmp_path: Path) -> None:
    extra = {"mask_npy": npy(np.ones((3, 2), np.int64))}
    shard = write_shard(tmp_path / "000.tar", [clip(i, (4, 1 + 2 * (i % 2), 8, 8), **extra) for i in range(4)])
    module = Flow()
    data = VideoDataModule(str(shard), budget=BUDGET)
    matrix = vs.benchmark_shapes(trainer_with(), module, data, seconds=1e-9, progress=False)
    assert {(row.frames, row.sequence_length) for row in matrix.rows} == {(1, 16), (3, 48)}
    for batch in module.batches:
        samples = batch["meta"].samples
        assert batch["mask"].shape == (samples, 3, 2) and batch["mask"].dtype == torch.int64
        assert len(batch["caption"]) == len(batch["sample_ids"]) == samples
        assert batch["caption"][0].startswith("a caption")


@pytest.mark.parametrize("in_backward", [False, True])
def test_out_of_memory_is_a_result_and_larger_batches_are_left_out(in_backward: bool) -> None:
    matrix = _benchmark(Small(50, in_backward=in_backward), shapes=SHAPES[:2], max_tokens=200)
    outcomes = {(row.sequence_length, row.samples): row.outcome for row in matrix.rows}
    assert outcomes == {
        (4, 1): "measured",
        (4, 4): "measured",
        (16, 1): "measured",
        (4, 16): "out_of_memory",  # and 50 of them are not tried any more
        (16, 4): "out_of_memory",  # nor 12 of these
    }
    assert all((row.seconds is None) == (row.outcome != "measured") for row in matrix.rows)


@pytest.mark.parametrize("per_token", [0.0, -1e6])
def test_peaks_that_do_not_grow_leave_no_cell_out(per_token: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of small cells may be that of the weights, which sharded parameters are gathered into."""
    module = Flow()
    monkeypatch.setattr(RealSteps, "exchanges_inside", True)
    monkeypatch.setattr(RealSteps, "capacity_bytes", 8e10)
    monkeypatch.setattr(RealSteps, "peak_bytes", property(lambda steps: 9e9 + per_token * _tokens(module)))
    matrix = _benchmark(module)
    assert len(matrix.rows) == 8 and {row.outcome for row in matrix.rows} == {"measured"}
    assert matrix.capacity_bytes == 8e10 and matrix.rows[0].peak_bytes == 9e9 + 4 * per_token


def _tokens(module: Flow) -> int:
    meta = module.batches[-1]["meta"]
    return int(meta.samples * meta.sequence_length)


def test_other_errors_are_raised() -> None:
    class Broken(Flow):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            raise RuntimeError("a bug of the user's")

    class Manual(Flow):
        automatic_optimization = False

    with pytest.raises(RuntimeError, match="a bug of the user's"):
        _benchmark(Broken())
    with pytest.raises(ValueError, match="Manual "):
        _benchmark(Manual())


def test_the_module_is_whole_again_after_an_error() -> None:
    class Broken(Flow):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            raise RuntimeError("a bug of the user's")

    module, trainer = Broken(), trainer_with()
    with pytest.raises(RuntimeError, match="a bug"):
        _benchmark(module, trainer)
    assert "log" not in vars(module) and "run" not in vars(trainer.fit_loop)


def _on_two_ranks(in_backward: bool) -> tuple[ShapeMatrix, bool]:
    module = Small(50, rank=1, in_backward=in_backward)
    before = copy.deepcopy(module.state_dict())
    matrix = _benchmark(module, trainer_with(strategy="ddp", devices=2), shapes=SHAPES[:2], max_tokens=200)
    return matrix, all(torch.equal(value.cpu(), before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("in_backward", [False, True])
def test_one_rank_without_memory_speaks_for_all(ranks: Ranks, in_backward: bool) -> None:
    (matrix, same), (theirs, same_there) = ranks(2).run(_on_two_ranks, in_backward)
    assert same and same_there and matrix == theirs
    measured = [row.samples * row.sequence_length for row in matrix.rows if row.outcome == "measured"]
    assert measured == [4, 16, 16] and [row.outcome for row in matrix.rows[3:]] == ["out_of_memory"] * 2
    assert matrix.provenance["world_size"] == 2


class DropsByItself(Flow):
    """Drops its gradients in its own way."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.dropped = getattr(self, "dropped", 0) + 1
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class OfMicroBatches(pl.Callback):
    """The gradients after the first micro-batch of a step, after another first, and after one that goes on."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batch = RandomBatches(4)(Cell(SHAPES[1], 16, 1))
        self.gradients = []
        with real_steps(trainer) as steps:
            for is_first in (True, True, False):
                torch.manual_seed(0)
                steps.run(dict(batch), is_first=is_first)
                self.gradients.append(pl_module.transformer.patch_embedding.weight.grad.clone())


def test_the_first_micro_batch_of_a_step_drops_gradients_as_training_does() -> None:
    seen, module = OfMicroBatches(), DropsByItself()
    batch = RandomBatches(4)(Cell(SHAPES[1], 16, 1))
    trainer_with(max_steps=1, callbacks=[seen]).fit(module, DataLoader([batch], batch_size=None))
    first, again, further = seen.gradients
    assert torch.equal(again, first) and torch.allclose(further, 2 * first)
    assert module.dropped == 2 + 1


class Where(pl.Callback):
    """Notes whether ranks meet within a step."""

    meet = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with real_steps(trainer) as steps:
            self.meet = steps.exchanges_inside


def _under(strategy: str) -> tuple[ShapeMatrix, bool]:
    where = Where()
    trainer = trainer_with(strategy=strategy, devices=2, callbacks=[where])
    return _benchmark(Flow(), trainer, shapes=SHAPES[:2], max_tokens=16), where.meet


@pytest.mark.parametrize("strategy", ["ulysses_ddp", "ulysses_fsdp2"])
def test_under_our_strategies(ranks: Ranks, strategy: str) -> None:
    (matrix, meet), theirs = ranks(2).run(_under, strategy)
    assert (matrix, meet) == theirs and meet
    assert [(row.samples, row.outcome) for row in matrix.rows] == [(1, "measured"), (4, "measured"), (1, "measured")]
    assert all(row.seconds and row.wait_seconds for row in matrix.rows)
    assert matrix.provenance["sequence_parallel_size"] == 2


class Observing(pl.Callback):
    """Keeps what the recalibrator would fit."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            self.seconds = [observed.seconds for observed in observations_of(window)]

        subscribe_to_steps(trainer, 100, receive)


def _measured_and_observed(shards: str) -> tuple[float, list[float]]:
    exchange = CollectiveTransport.exchange

    def slow_exchange(*args: Any) -> torch.Tensor:
        time.sleep(0.1)
        return exchange(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CollectiveTransport, "exchange", slow_exchange)
        trainer = trainer_with(strategy="ulysses_ddp", devices=2)
        [row] = _benchmark(Flow(), trainer, shapes=SHAPES[2:3], max_tokens=48).rows
        observing, data = Observing(), VideoDataModule(shards, budget=BUDGET)
        trainer_with(strategy="ulysses_ddp", devices=2, max_steps=4, callbacks=[observing]).fit(Flow(), data)
    assert row.seconds is not None
    return row.seconds, observing.seconds


@pytest.mark.timed
def test_the_recalibrator_observes_what_the_benchmark_measures(ranks: Ranks, tmp_path: Path) -> None:
    """Forward, backward and exchanges: all ranks of a group pay them, so that they are the micro-batch's cost."""
    shard = write_shard(tmp_path / "000.tar", [clip(i, (4, 3, 8, 8)) for i in range(4)])
    for measured, observed in ranks(2).run(_measured_and_observed, str(shard)):
        assert 4 * 0.1 <= measured < 0.8, "two exchanges of forward and two of backward"
        # The shortest: what else the machine does makes single micro-batches longer.
        assert min(observed) == pytest.approx(measured, rel=0.25)
