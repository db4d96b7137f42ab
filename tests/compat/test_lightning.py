"""What we use of Lightning in private does what we say, in a real Trainer of the installed version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from lightning_videoscale.compat import lightning as private
from lightning_videoscale.compat.lightning import training_loop
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class Recorder(pl.Callback):
    """Calls a function at the start of every training batch, and keeps what it returns."""

    def __init__(self, call: Callable[[pl.Trainer, int], Any]) -> None:
        self.call = call
        self.returned: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.returned.append(self.call(trainer, index))


class Model(BoringModel):
    """Adds to batches what its hooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(6, 32), batch_size=1)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 10


def trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "limit_val_batches": 0, "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **(quiet | kwargs))


# -- strategies ------------------------------------------------------------------------------------------------------


class Launched(private.LaunchedStrategy, DDPStrategy):
    def check_launcher(self) -> None:
        self.checked = self.launcher.is_interactive_compatible, private.is_interactive()


def test_a_strategy_sees_its_launcher_before_lightning_judges_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    strategy = Launched()
    with pytest.raises(MisconfigurationException, match="ddp_notebook"):
        trainer(strategy=strategy)
    assert strategy.checked == (False, True)


def test_a_function_checks_the_precision_in_lightnings_place(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector"
    monkeypatch.setattr(f"{connector}._validate_precision_choice", _AcceleratorConnector._validate_precision_choice)
    seen: list[tuple[type, str]] = []
    private.leave_precision_to(
        lambda strategy, precision: bool(seen.append((type(strategy), precision))) or len(seen) > 1
    )
    with pytest.raises(ValueError, match=r"ModelParallelStrategy.*64-true"):
        trainer(strategy=ModelParallelStrategy(), precision="64-true")
    assert trainer(strategy=ModelParallelStrategy(), precision="64-true").precision == "64-true"
    assert seen == [(ModelParallelStrategy, "64-true")] * 2


# -- batches and hooks -------------------------------------------------------------------------------------------------


def test_batches_pass_the_users_hooks() -> None:
    model = Model()

    def batches(_: pl.Trainer, __: int) -> list[float]:
        zero = torch.zeros(())
        moved = private.transferred(model, zero, torch.device("meta"))
        return [private.before_transfer(model, zero).item(), moved.device.type]

    recorder = Recorder(batches)
    trainer(recorder, max_steps=1).fit(model)
    assert recorder.returned == [[1.0, "meta"]]
    assert private.transferred(model, torch.zeros(()), torch.device("cpu")).item() == 10.0


def test_a_hook_of_all_callbacks_is_called() -> None:
    first, second = Recorder(lambda _, index: index), Recorder(lambda _, index: -index)
    runner = trainer(first, second, fast_dev_run=True)
    runner.strategy.connect(BoringModel())
    private.call_callbacks(runner, "on_train_batch_start", None, 7)
    assert (first.returned, second.returned) == ([7], [-7])


class Predicting(pl.Callback):
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader = trainer.predict_dataloaders
        indices = private.recorded_indices(loader)
        next(indices)
        self.record = list(loader.batch_sampler.seen_batch_indices)
        self.users = private.users_batch_sampler(loader.batch_sampler)
        self.wrapper = loader.batch_sampler


def test_the_record_of_indices_is_advanced_and_unwrapped() -> None:
    predicting, loader = Predicting(), DataLoader(torch.zeros(4, 32), batch_size=2)
    trainer(predicting).predict(BoringModel(), loader)
    assert predicting.record == [[0, 1]]
    assert type(predicting.users) is type(loader.batch_sampler)
    assert private.users_batch_sampler(loader.batch_sampler) is loader.batch_sampler
    assert list(private.recorded_indices(loader)) == list(private.recorded_indices([1, 2])) == []
    sampler = SequentialSampler(range(3))
    holders = [predicting.wrapper, DistributedSamplerWrapper(sampler, num_replicas=1, rank=0).dataset]
    assert [getattr(holder, name) for holder, name in zip(holders, private.WRAPPED_SAMPLERS, strict=True)] == [
        predicting.users,
        sampler,
    ]


# -- the training loop -------------------------------------------------------------------------------------------------


def test_whether_a_micro_batch_accumulates() -> None:
    seen: list[bool] = []

    class BeforeBackward(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
            seen.append(training_loop.accumulates(trainer))

    trainer(BeforeBackward(), accumulate_grad_batches=2, limit_train_batches=3).fit(BoringModel())
    assert seen == [True, False, False]  # the last step of an epoch may be a shorter one


def test_the_loop_tells_the_profiler_that_it_fetches() -> None:
    profiler = SimpleProfiler()
    trainer(profiler=profiler, limit_train_batches=2).fit(BoringModel())
    assert len(profiler.recorded_durations[private.FETCH_ACTION]) in (2, 3)


def test_where_ranks_wait_between_batches() -> None:
    runner = trainer(limit_train_batches=2)
    [method] = training_loop.waits_between_batches(runner)
    assert callable(getattr(*method))
    training_loop.skip_waits_between_batches(runner)
    runner.fit(BoringModel())
    assert runner.global_step == 2


def test_a_function_is_called_before_each_batch_is_fetched() -> None:
    seen: list[tuple[int, bool]] = []
    runner = trainer(limit_train_batches=2)
    progress = runner.fit_loop.epoch_loop.batch_progress
    training_loop.before_each_batch(
        runner, lambda: seen.append((progress.current.ready, training_loop.accumulates(runner)))
    )
    runner.fit(BoringModel())
    assert seen == [(0, False), (1, False)]


class Batches(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(self.count, 32))


def skip_from_the_third(_: pl.Trainer, index: int) -> int | None:
    return -1 if index == 2 else None


def stop_in_the_second(trainer: pl.Trainer, index: int) -> None:
    trainer.should_stop |= index == 1


@pytest.mark.parametrize(
    ("data", "hook", "seen"),
    [
        (torch.randn(2, 32), None, [(0, 2, 2), "validation", (1, 2, 4), "validation"]),
        (Batches(2), None, [(0, 2, 2), "validation", (1, 2, 4), "validation"]),
        (Batches(0), None, [(0, 0, 0), (1, 0, 0)]),
        (torch.randn(5, 32), skip_from_the_third, [(0, 3, 3), (1, 3, 6)]),
        (torch.randn(5, 32), stop_in_the_second, [(0, 2, 2), "validation"]),
    ],
    ids=["sized", "iterable", "empty", "skipped", "stopped"],
)
def test_a_function_is_called_at_the_end_of_an_epoch_before_its_validation(
    data: Any, hook: Callable[[pl.Trainer, int], int | None] | None, seen: list[Any]
) -> None:
    found: list[Any] = []
    model = BoringModel()
    model.on_validation_start = lambda: found.append("validation")  # type: ignore[method-assign]
    runner = trainer(max_epochs=2, limit_val_batches=1)
    if hook is not None:
        model.on_train_batch_start = lambda _, index: hook(runner, index)  # type: ignore[method-assign]
    training_loop.at_end_of_epoch(runner, lambda: found.append(tuple(training_loop.batches_begun(runner))))
    runner.fit(model, DataLoader(data), DataLoader(torch.randn(1, 32)))
    assert found == ["validation", *seen]  # the sanity check's


def test_or_after_a_validation_in_the_middle_that_stops_training() -> None:
    found: list[Any] = []
    model, runner = BoringModel(), trainer(limit_val_batches=1, val_check_interval=2, num_sanity_val_steps=0)

    def stop() -> None:
        found.append("validation")
        runner.should_stop = True

    model.on_validation_end = stop  # type: ignore[method-assign]
    training_loop.at_end_of_epoch(runner, lambda: found.append(tuple(training_loop.batches_begun(runner))))
    runner.fit(model, DataLoader(torch.randn(5, 32)), DataLoader(torch.randn(1, 32)))
    assert found == ["validation", (0, 2, 2)]


def test_signals_reach_other_handlers_and_where_a_scheduler_finds_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/requeued\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    send = Recorder(lambda *_: [os.kill(os.getpid(), number) for number in numbers])
    runner = trainer(send, plugins=[SLURMEnvironment()], limit_train_batches=1, default_root_dir=tmp_path)
    requeue = private.replace_signal_handlers(runner, lambda: heard.append("end"), lambda: heard.append("requeue"))
    runner.fit(BoringModel())
    assert heard == ["end", "requeue"]
    assert [signal.getsignal(number) for number in numbers] == before
    first = private.scheduler_checkpoint(runner)
    requeue()
    assert Path(first).exists() and private.scheduler_checkpoint(runner) != first
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    private.note_sigterm(runner)
    assert runner.received_sigterm


@pytest.mark.parametrize(("limit", "left"), [(1.0, 10), (0.5, 5), (3, 3), (100, 10), (None, 10)])
def test_limits_are_those_of_lightning(limit: float | None, left: int) -> None:
    runner = trainer(limit_train_batches=limit)
    assert training_loop.limited_batches(10, runner.limit_train_batches) == left
    runner.fit(BoringModel(), DataLoader(torch.zeros(10, 32)))
    assert runner.num_training_batches == left


def test_an_epoch_gets_another_length() -> None:
    recorder = Recorder(lambda trainer, index: training_loop.set_epoch_length(trainer, 3) if index == 1 else None)
    runner = trainer(recorder)
    runner.fit(Model())
    assert len(recorder.returned) == runner.num_training_batches == 3


def test_a_trainer_asks_for_another_loader() -> None:
    runner = trainer(limit_train_batches=1)
    runner.fit(Model())
    assert runner.train_dataloader is not None
    training_loop.forget_training_loader(runner)
    assert runner.train_dataloader is None


class GoingOn(Sampler[int]):
    """What is left of an epoch after two batches, of which it tells the Trainer when the epoch begins."""

    runner: pl.Trainer

    def set_epoch(self, epoch: int) -> None:
        training_loop.place_in_epoch(self.runner, epoch=0, batches=2, total=2)

    def __iter__(self) -> Iterator[int]:
        return iter(range(2, 6))

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("warned_of", [False, True])
def test_a_run_goes_on_within_an_epoch_and_warnings_are_as_before(warned_of: bool) -> None:
    sampler = GoingOn()
    seen = Recorder(lambda trainer, index: (index, trainer.fit_loop.epoch_loop.total_batch_idx))
    sampler.runner = trainer(seen)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        sampler.runner.fit(BoringModel(), DataLoader(torch.zeros(6, 32), sampler=sampler))
        assert warnings.filters == before
        if warned_of:
            warnings.warn("You're resuming from a checkpoint that ended before the epoch ended", stacklevel=1)
    assert seen.returned == [(2, 2), (3, 3), (4, 4), (5, 5)]
    assert any("resuming from a checkpoint" in str(warning.message) for warning in caught) is warned_of
    assert "reset" not in vars(sampler.runner.fit_loop.epoch_loop)


# -- strategies --------------------------------------------------------------------------------------------------------


class Wrapping(private.WrappingDDPStrategy):
    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        self.wrapped = super().wrap(model)
        return self.wrapped


def fit_ddp() -> tuple[bool, dict[str, Any], timedelta | None]:
    strategy = Wrapping(timeout=timedelta(seconds=40), gradient_as_bucket_view=True)
    trainer(strategy=strategy, fast_dev_run=True).fit(BoringModel())
    return (
        isinstance(strategy.wrapped, DistributedDataParallel),
        private.ddp_arguments(strategy),
        private.timeout_of(strategy),
    )


def test_ddp_wraps_by_the_public_method(ranks: Ranks) -> None:
    assert ranks(1).run(fit_ddp) == [(True, {"gradient_as_bucket_view": True}, timedelta(seconds=40))]


def set_up_fsdp2() -> tuple[int, bool, bool]:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    trainer(strategy=strategy)
    private.set_up_processes(strategy)
    mesh, module = init_device_mesh("cpu", (1,)), BoringModel()
    for owner in (strategy, module):
        private.set_device_mesh(owner, mesh)
    return strategy.global_rank, strategy.device_mesh is mesh, module.device_mesh is mesh


def test_a_model_parallel_strategy_gets_its_processes_and_its_mesh(ranks: Ranks) -> None:
    assert ranks(1).run(set_up_fsdp2) == [(0, True, True)]


def test_states_of_optimizers_are_moved() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    private.optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[weight]["exp_avg"].is_meta


def test_the_processes_that_a_launcher_started() -> None:
    launcher = pl.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False).strategy.launcher
    assert private.launched_processes(launcher) == []
    process = subprocess.Popen([sys.executable, "-c", ""])
    launcher.procs.append(process)
    assert private.launched_processes(launcher) == [process]
    assert process.wait() == 0
    assert private.launched_processes(None) == ()


def test_rank_0_outlives_the_processes_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = pl.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False).strategy.launcher
    assert not private.end_observation(launcher)
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert failed.wait() == 3
    launcher.procs.append(failed)
    observer, killed = _ChildProcessObserver(os.getpid(), launcher.procs), []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    assert private.end_observation(launcher)
    assert observer._run() and killed == []
    assert private.launched_processes(launcher) == [failed]
    assert _ChildProcessObserver(os.getpid(), launcher.procs)._run() and killed == [(os.getpid(), signal.SIGKILL)]


def test_no_group_is_left_behind() -> None:
    assert not dist.is_initialized()
