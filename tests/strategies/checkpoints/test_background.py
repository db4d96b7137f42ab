"""Checkpoints that are written while training goes on: the state of their step, whole or not there, errors for all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, read_weights
from lightning_videoscale.strategies.checkpoints import background, places
from lightning_videoscale.strategies.checkpoints.background import own_share
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from tests.distributed.pool import ProcessPool
from tests.distributed.strategies.resuming import Flow, Run, read
from tests.distributed.wan_training import Clips
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.strategies.checkpoints.checkpointing import NOTHING_TO_SPLIT, Module, Stateful, message

Ranks = Callable[[int], ProcessPool]


class Slow(FileSystemWriter):
    """A disk that writes when it is told to."""

    opened = threading.Event()
    ranks: tuple[int, ...] = (0, 1)

    def write_data(self, *args: Any) -> Any:
        if dist.get_rank() in self.ranks:
            assert self.opened.wait(60)
            if "full" in str(self.path):
                raise OSError(28, "No space left on device")
        return super().write_data(*args)


def trainer(epochs: int = 1, timeout: float = 60.0, callbacks: Any = (), **options: Any) -> pl.Trainer:
    strategy = SequenceParallelDDPStrategy(modules=["net"], plan=NOTHING_TO_SPLIT, timeout=timedelta(seconds=timeout))
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_epochs=epochs, logger=False,
        plugins=[AsyncCheckpointIO()], callbacks=list(callbacks), num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


class At(Callback):
    """Calls functions at the end of steps."""

    def __init__(self, **steps: Callable[[pl.Trainer], Any]) -> None:
        self.steps = {int(name.removeprefix("step")): function for name, function in steps.items()}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            self.steps[trainer.global_step](trainer)


# -- what is in it ---------------------------------------------------------------------------------------------------


class SaveAfterFirst(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def train_flow(run: Run, path: Path, plugins: list[Any]) -> None:
    with ExitStack() as contexts:
        if run.strategy == "zero":
            contexts.enter_context(deepspeed_on_cpu())
        runner = pl.Trainer(
            strategy=run.create(), accelerator="cpu", devices=run.ranks, max_epochs=2, plugins=plugins, logger=False,
            callbacks=[SaveAfterFirst(path)], enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        torch.manual_seed(dist.get_rank())
        runner.fit(Flow(), DataLoader(Clips((2, 4, 4), torch.float32), batch_size=4 // run.dp))


@pytest.mark.parametrize(
    "run", [Run("fsdp2", 2, 1, 1), pytest.param(Run("zero", 2, 1, 1, 3), marks=needs_deepspeed)], ids=str
)
def test_holds_the_same_as_one_that_training_waits_for(ranks: Ranks, tmp_path: Path, run: Run) -> None:
    for name, plugins in (("waits", []), ("goes_on", [AsyncCheckpointIO()])):
        ranks(2).run(train_flow, run, tmp_path / f"{name}.ckpt", plugins)
    one, other = read(tmp_path / "waits.ckpt"), read(tmp_path / "goes_on.ckpt")
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    rests = [CheckpointFolder(tmp_path / f"{name}.ckpt").rest for name in ("waits", "goes_on")]
    assert rests[0]["loops"] == rests[1]["loops"] and rests[0]["global_step"] == rests[1]["global_step"] == 2


def save_slowly(folder: Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Saves at step 1, writes after step 3."""
    seen: dict[str, Any] = {}
    Slow.opened.clear()

    def save(runner: pl.Trainer) -> None:
        runner.save_checkpoint(folder / "slow.ckpt")
        seen.update({name: value.clone() for name, value in runner.lightning_module.state_dict().items()})

    def write(runner: pl.Trainer) -> None:
        seen["is there"] = (folder / "slow.ckpt").exists()
        Slow.opened.set()

    with patch.object(places, "FileSystemWriter", Slow):
        trainer(callbacks=[At(step1=save, step3=write)]).fit(Module(), datamodule=Stateful())
    was_there = seen.pop("is there")
    return seen, dict(read_weights(folder / "slow.ckpt")), was_there


def test_holds_the_state_of_its_step(ranks: Ranks, tmp_path: Path) -> None:
    expected, got, was_there = ranks(2).run(save_slowly, tmp_path)[0]
    assert not was_there and expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def shares(rank_only: str) -> tuple[list[str], dict[str, list[str]]]:
    rank = dist.get_rank()
    tensors = {"weights": {f"w{i}": torch.ones(i + 1) for i in range(6)}, "states": {"a": {"b": torch.ones(3)}}}
    if rank == 0:
        tensors["weights"][rank_only] = torch.ones(2)
    kept = own_share(tensors)
    return sorted(kept["weights"]), {name: list(state) for name, state in kept["states"].items()}


def test_ranks_copy_what_all_hold_once_together(ranks: Ranks) -> None:
    (first, states), (second, others) = ranks(2).run(shares, "buffer")
    assert sorted(first + second) == ["buffer", *(f"w{i}" for i in range(6))] and "buffer" in first
    assert abs(len(first) - len(second)) <= 2 and sorted(states["a"] + others["a"]) == ["b"]


# -- one at a time -----------------------------------------------------------------------------------------------------


def save_twice(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """A second save while the first is being written; what was kept before goes when the second is whole."""
    said: list[str] = []
    seen: list[list[str]] = []
    Slow.opened.clear()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
    # Lightning calls callbacks that write checkpoints last.
    second = threading.Timer(2.0, Slow.opened.set)
    look = At(step2=lambda _: seen.append(names(folder)), step4=lambda _: second.start())
    with patch.object(places, "FileSystemWriter", Slow), patch.object(background, "rank_zero_info", said.append):
        trainer(callbacks=[keep, look]).fit(Module(), datamodule=Stateful())
    return said, seen[0], names(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_second_save_waits_for_the_first(ranks: Ranks, tmp_path: Path) -> None:
    said, during, after = ranks(2).run(save_twice, tmp_path)[0]
    assert not during and after == ["step=4.ckpt"]
    assert "step=2.ckpt" in said[0] and "before" in said[0] and "step=4.ckpt" in said[0]


# -- errors ------------------------------------------------------------------------------------------------------------


def save_to_a_full_disk(folder: Path, at: str) -> tuple[str, int, list[str]]:
    """Rank 1 cannot write: it is told at the next save, or at the end of the run."""
    Slow.opened.set()
    steps = {"step1": "whole.ckpt", "step2": "full.ckpt"} | ({"step3": "next.ckpt"} if at == "the next save" else {})
    saves = {step: lambda runner, name=name: runner.save_checkpoint(folder / name) for step, name in steps.items()}
    runner = trainer(callbacks=[At(**saves)])
    with patch.object(places, "FileSystemWriter", Slow), patch.object(Slow, "ranks", (1,)):
        said = message(lambda: runner.fit(Module(), datamodule=Stateful()))
    return said, runner.global_step, names(folder)


@pytest.mark.parametrize("at", ["the next save", "the end"])
def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path, at: str) -> None:
    pool = ProcessPool(2)
    for said, steps, left in pool.run(save_to_a_full_disk, tmp_path, at):
        assert "full.ckpt" in said and "No space left" in said and "CheckpointError" in said
        assert "Ranks [1]" in said
        assert steps == (3 if at == "the next save" else 4) and left == ["whole.ckpt"]
    pool.stop()


def hang(folder: Path) -> tuple[str, float]:
    """Rank 1's store does not answer."""
    Slow.opened.clear()
    steps = At(step2=lambda runner: runner.save_checkpoint(folder / "hung.ckpt"))
    start = time.monotonic()
    with patch.object(places, "FileSystemWriter", Slow), patch.object(Slow, "ranks", (1,)):
        said = message(lambda: trainer(timeout=4.0, callbacks=[steps]).fit(Module(), datamodule=Stateful()))
    return said, time.monotonic() - start


def test_the_end_of_training_waits_for_so_long_and_names_who_is_missing(tmp_path: Path) -> None:
    pool = ProcessPool(2)
    for said, seconds in pool.run(hang, tmp_path):
        assert "CheckpointError" in said and "hung.ckpt" in said and "ranks [1]" in said and seconds < 30
    pool.stop()
    assert not (tmp_path / "hung.ckpt").exists()


# -- killed and stopped ------------------------------------------------------------------------------------------------


def save_and_die(folder: Path) -> None:
    """Killed while the second checkpoint is being written, of which one is kept."""
    Slow.opened.set()
    keep = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)

    def close(runner: pl.Trainer) -> None:
        while not (folder / "last.ckpt").exists():
            time.sleep(0.01)
        Slow.opened.clear()

    with patch.object(places, "FileSystemWriter", Slow):
        steps = At(step3=close, step4=lambda _: os.kill(os.getpid(), signal.SIGKILL))
        trainer(2, callbacks=[At(step3=close), keep, steps]).fit(Module(), datamodule=Stateful())


def steps_of(path: Path) -> int:
    return int(CheckpointFolder(path).rest["global_step"])


def test_a_kill_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    pool = ProcessPool(1)
    with pytest.raises(AssertionError, match="rank 0 of 1 failed"):
        pool.run(save_and_die, tmp_path)
    assert names(tmp_path) == ["last.ckpt"] and steps_of(tmp_path / "last.ckpt") == 2


def exit_code(call: Callable[[], Any]) -> Any:
    try:
        call()
    except SystemExit as error:
        return error.code
    return None


def stop_while_writing(folder: Path) -> tuple[int, int]:
    """Asked to end while a checkpoint is being written."""
    Slow.opened.clear()
    keep = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)

    def ask(_: pl.Trainer) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(1.0, Slow.opened.set).start()

    with patch.object(places, "FileSystemWriter", Slow):
        runner = trainer(50, callbacks=[keep, At(step2=ask)], default_root_dir=folder)
        return exit_code(lambda: runner.fit(Module(), datamodule=Stateful())), runner.global_step


def test_a_signal_to_end_waits_for_what_is_being_written(ranks: Ranks, tmp_path: Path) -> None:
    codes, steps = zip(*ranks(2).run(stop_while_writing, tmp_path), strict=True)
    assert set(codes) == {143} and len(set(steps)) == 1
    assert steps_of(tmp_path / "hpc_ckpt_1.ckpt") == steps[0]
    assert 2 <= steps_of(tmp_path / "last.ckpt") <= steps[0]
