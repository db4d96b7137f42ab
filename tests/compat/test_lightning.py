"""What we use of Lightning in private does what we say, in a real Trainer of the installed version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SequentialSampler

from lightning_videoscale.compat import lightning as private
from tests.compat.trainers import Model, Recorder, trainer
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


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


# -- checkpoints -------------------------------------------------------------------------------------------------------


class OtherIO(TorchCheckpointIO):
    pass


def test_a_plugin_that_writes_in_the_background_is_known() -> None:
    assert not private.is_asynchronous(trainer().strategy.checkpoint_io, "ours")
    assert private.is_asynchronous(trainer(plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io, "ours")
    for other in (OtherIO(), AsyncCheckpointIO(OtherIO())):
        with pytest.raises(ValueError, match=r"ours.*OtherIO"):
            private.is_asynchronous(trainer(plugins=[other]).strategy.checkpoint_io, "ours")


@pytest.mark.parametrize("behind_url", [True, False])
def test_the_last_checkpoint_is_found_behind_a_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behind_url: bool
) -> None:
    monkeypatch.setattr(ModelCheckpoint, "_find_last_checkpoints", ModelCheckpoint._find_last_checkpoints)
    for _ in range(2):
        private.find_last_checkpoints_by_url()
    root = f"memory://compat{tmp_path}" if behind_url else str(tmp_path)
    steps: list[int] = []
    for epochs in (1, 2):
        starts = Recorder(lambda trainer, _: steps.append(trainer.global_step))
        keeps = ModelCheckpoint(save_last=True)
        settings: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": epochs, "default_root_dir": root}
        trainer(starts, keeps, limit_train_batches=1, **settings).fit(BoringModel(), ckpt_path="last")
    assert steps == [0, 1]


# -- signals ----------------------------------------------------------------------------------------------------------


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


# -- strategies --------------------------------------------------------------------------------------------------------


def test_a_strategy_is_told_to_synchronize_layers() -> None:
    for wanted, kind in ((True, TorchSyncBatchNorm), (False, type(None))):
        strategy = ModelParallelStrategy()
        trainer(strategy=strategy, sync_batchnorm=wanted)
        assert type(private.layer_sync_of(strategy)) is kind


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


def test_a_launcher_of_processes_knows_that_these_have_fitted() -> None:
    runner = pl.Trainer(strategy="ddp_notebook", accelerator="cpu", devices=1, logger=False)
    assert not private.has_fitted_elsewhere(runner.strategy.launcher)
    runner.strategy.launcher._already_fit = True  # as after `launch`
    assert private.has_fitted_elsewhere(runner.strategy.launcher)
    assert not private.has_fitted_elsewhere(None)
