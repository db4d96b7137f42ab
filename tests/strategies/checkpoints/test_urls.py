"""Checkpoints behind URLs: everything that one on a disk can do, and whole or not there, whenever a job is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_videoscale.cli import main
from lightning_videoscale.strategies import read_weights
from lightning_videoscale.strategies.checkpoints import folder as checkpoint_folder
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from lightning_videoscale.strategies.checkpoints.frozen import LEFT_OUT
from tests.distributed.pool import ProcessPool
from tests.distributed.strategies.resuming import Run, read, train
from tests.distributed.zero import needs_deepspeed
from tests.models import gradient_error, tiny_wan
from tests.object_store import ObjectStore, google_store, needs_google_store, object_store, url
from tests.strategies.checkpoints import adapted
from tests.strategies.checkpoints.checkpointing import Module, Stateful, fit, message, trainer

Ranks = Callable[[int], ProcessPool]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


def at(environment: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """For workers: calls a function that finds the store."""
    os.environ |= environment
    return function(*args)


# -- every strategy ------------------------------------------------------------------------------------------------


CHAINS = [
    pytest.param((Run("fsdp2", 1, 1, 2), Run("ddp", 2, 1, 1)), marks=pytest.mark.full),
    pytest.param((Run("zero", 2, 1, 1, 3), Run("fsdp2", 1, 1, 2)), marks=needs_deepspeed),
]


@pytest.mark.parametrize("runs", CHAINS, ids=lambda runs: "-".join(map(str, runs)))
def test_saved_to_a_url_and_continued_from_it(
    ranks: Ranks, store: ObjectStore, tmp_path: Path, runs: tuple[Run, Run]
) -> None:
    first, second = runs
    start, dtype = url(f"{first}.ckpt"), torch.float32
    ranks(2).run(at, store.environment, train, first, 1, dtype, None, start)
    losses = ranks(2).run(at, store.environment, train, second, 2, dtype, start, url("end.ckpt"))
    uninterrupted = ranks(2).run(train, second, 2, dtype, None, tmp_path / "end.ckpt")
    assert len(losses[0]) == 4
    for got, expected in zip(losses, uninterrupted, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    assert gradient_error(read(url("end.ckpt")), read(tmp_path / "end.ckpt")) <= 1e-5


# -- ModelCheckpoint, last, retention ------------------------------------------------------------------------------


def keep_two(epochs: int, start: str | None) -> tuple[int, list[float]]:
    """Runs whose folders are all behind URLs; returns what they continued from, and the weights."""
    keep = ModelCheckpoint(monitor="loss", mode="min", save_top_k=2, save_last=True, every_n_train_steps=1)
    module = Module()
    kwargs = {"callbacks": [keep], "enable_checkpointing": True, "default_root_dir": url("runs")}
    runner = trainer(epochs, limit_train_batches=3, **kwargs)
    before: list[int] = []
    module.on_train_start = lambda: before.append(runner.global_step)
    torch.manual_seed(5)
    runner.fit(module, datamodule=Stateful(), ckpt_path=start)
    return before[0], module.net.first.weight.flatten().tolist()


def test_last_is_found_and_what_is_not_kept_goes(ranks: Ranks, store: ObjectStore) -> None:
    assert {steps for steps, _ in ranks(2).run(at, store.environment, keep_two, 1, "last")} == {0}
    keys = store.keys("runs/checkpoints")
    checkpoints = [key for key in keys if "/" not in key]
    assert len(checkpoints) == 3 and "last.ckpt" in checkpoints, keys
    folders = {key.rpartition("/")[0] for key in keys if "/" in key}
    assert len(folders) == 3, "each checkpoint has the tensors of the last time that it was saved"
    assert {folder.partition("/")[0] for folder in folders} == {f".{name}.tensors" for name in checkpoints}
    stopped, continued = ranks(2).run(at, store.environment, keep_two, 2, "last"), ranks(1)
    assert {steps for steps, _ in stopped} == {3}
    assert continued.run(at, store.environment, keep_two, 3, "last")[0][0] == 6, "on another number of ranks"


def stop_and_continue() -> list[int]:
    """As a scheduler's signal does, after which a job of SLURM's looks for the checkpoint by itself."""
    runner = trainer(2, default_root_dir=url("preempted"))
    module = Module()
    module.on_train_epoch_end = lambda: os.kill(os.getpid(), signal.SIGTERM)
    said = message(lambda: exit_of(lambda: runner.fit(module, datamodule=Stateful())))
    again = trainer(2, default_root_dir=url("preempted"))
    again.fit(Module(), datamodule=Stateful(), ckpt_path="hpc")
    return [said, runner.global_step, again.global_step]


def exit_of(call: Callable[[], Any]) -> None:
    try:
        call()
    except SystemExit as error:
        raise RuntimeError(f"exit {error.code}") from None


def test_a_preempted_job_goes_on_from_a_url(ranks: Ranks, store: ObjectStore) -> None:
    said, stopped, ended = ranks(1).run(at, store.environment, stop_and_continue)[0]
    assert "143" in said and 4 <= stopped < 8 and ended == 8
    assert [key for key in store.keys("preempted") if "/" not in key] == ["hpc_ckpt_1.ckpt"]


# -- whole or not there --------------------------------------------------------------------------------------------


def save_and_die(name: str, where: str) -> None:
    """Saves, trains, and is killed while it saves again under the same name."""
    module = Module()
    runner = fit(1, module)
    if where != "the first time":
        runner.save_checkpoint(url(name))
    with torch.no_grad():
        module.net.scale.fill_(-1)

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "after the tensors":
        checkpoint_folder.on_first = lambda function, what, group=None: die() if "place" in what else function()
    else:  # a part of the tensors is there
        checkpoint_folder.save = die
    runner.save_checkpoint(url(name))


@pytest.mark.parametrize("where", ["the first time", "before the tensors", "after the tensors"])
def test_a_save_that_is_killed_leaves_what_was_there(ranks: Ranks, store: ObjectStore, where: str) -> None:
    folder = f"killed {where}"
    name = f"{folder}/last.ckpt"
    with pytest.raises(AssertionError, match="rank 0 of 1 failed"):
        ProcessPool(1).run(at, store.environment, save_and_die, name, where)
    left = store.keys(folder)
    if where == "the first time":
        assert "last.ckpt" not in left and left
        with pytest.raises(CheckpointError, match="nothing is there"):
            CheckpointFolder(url(name))
    else:
        assert float(read_weights(url(name))["net.scale"]) > 0
        assert len(saved_times(left)) == 2
    start = 0 if where == "the first time" else 1
    assert ranks(1).run(at, store.environment, go_on, folder) == [2 - start]
    assert len(saved_times(store.keys(folder))) == 1, "what was left is removed"


def saved_times(keys: list[str]) -> set[str]:
    """The folders of tensors that ``last.ckpt`` has or had."""
    return {key.split("/")[1] for key in keys if key.startswith(".last.ckpt.tensors/")}


def go_on(folder: str) -> int:
    """How many epochs were still to train."""
    keep = ModelCheckpoint(url(folder), save_last=True, save_top_k=0)
    trained: list[int] = []
    module = Module()
    module.on_train_epoch_start = lambda: trained.append(1)
    fit(2, module, start="last", callbacks=[keep], enable_checkpointing=True).save_checkpoint(
        url(f"{folder}/last.ckpt")
    )
    return len(trained)


def train_in_a_missing_bucket() -> str:
    keep = ModelCheckpoint("s3://nobodys/run")
    return message(lambda: fit(1, Module(), callbacks=[keep], enable_checkpointing=True))


def test_a_missing_bucket_is_said_before_training(ranks: Ranks, store: ObjectStore) -> None:
    for said in ranks(2).run(at, store.environment, train_in_a_missing_bucket):
        assert "CheckpointError" in said and "s3://nobodys/run" in said and "dirpath of ModelCheckpoint" in said
    with pytest.raises(CheckpointError, match="pathlib"):
        CheckpointFolder(Path(url("run/last.ckpt")))


# -- copies, other formats, export ---------------------------------------------------------------------------------


def save_here_and_there(folder: Path) -> None:
    runner = fit(1, Module())
    runner.save_checkpoint(folder / "here.ckpt")
    runner.save_checkpoint(url("copies/there.ckpt"))
    single = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False)
    single.fit(Module(), datamodule=Stateful())
    single.save_checkpoint(url("copies/lightnings.ckpt"))
    assert fit(2, Module(), start=url("copies/lightnings.ckpt")).current_epoch == 2


def test_copies_between_a_disk_and_a_store_are_checkpoints(ranks: Ranks, store: ObjectStore, tmp_path: Path) -> None:
    ranks(1).run(at, store.environment, save_here_and_there, tmp_path)
    for file in (tmp_path / "here.ckpt").iterdir():
        store.put(f"copies/here.ckpt/{file.name}", file.read_bytes())
    store.download("copies", tmp_path / "copies")
    here = read_weights(tmp_path / "here.ckpt")
    places = [url("copies/here.ckpt"), url("copies/there.ckpt"), tmp_path / "copies" / "there.ckpt"]
    for place in places:
        there = read_weights(place)
        assert here.keys() == there.keys() and all(torch.equal(value, there[name]) for name, value in here.items())
    assert read_weights(url("copies/lightnings.ckpt")).keys() == here.keys()
    (tmp_path / "copies" / "there.ckpt").rename(tmp_path / "alone.ckpt")
    with pytest.raises(CheckpointError, match=r"\.there\.ckpt\.tensors"):
        read_weights(tmp_path / "alone.ckpt")


def train_adapters() -> torch.Tensor:
    seen = adapted.Look()
    adapted.fit(adapted.Adapted(), "fsdp2", 1, None, url("adapters.ckpt"), [seen])
    again = adapted.Look()
    adapted.fit(adapted.Adapted(seed=8), "ddp", 1, url("adapters.ckpt"), None, [again])
    return seen.seen


def test_adapters_are_exported_from_a_url(
    ranks: Ranks, store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ranks(2).run(at, store.environment, train_adapters)[0]
    assert CheckpointFolder(url("adapters.ckpt")).rest["lightning_videoscale"][LEFT_OUT]
    tiny_wan().save_pretrained(tmp_path / "base")
    assert main(["export", url("adapters.ckpt"), str(tmp_path / "lora")]) == 0
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()
    merge = ["--merge", "--base", str(tmp_path / "base")]
    assert main(["export", url("adapters.ckpt"), str(tmp_path / "merged"), *merge]) == 0
    merged = adapted.look(type(tiny_wan()).from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=2e-6)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["export", url("adapters.ckpt"), url("lora")])
    assert "name a folder on a disk" in " ".join(capsys.readouterr().err.split())


# -- another store -------------------------------------------------------------------------------------------------


def train_at_google(epochs: int) -> list[int]:
    """The step that a run began with, and the one that it ended with."""
    keep = ModelCheckpoint("gs://bucket/run", save_last=True, save_top_k=1)
    module = Module()
    began: list[int] = []
    module.on_train_start = lambda: began.append(module.global_step)
    runner = fit(epochs, module, start="last", callbacks=[keep], enable_checkpointing=True)
    return [began[0], runner.global_step]


@needs_google_store
@pytest.mark.full  # the emulator cannot move objects, and gcsfs asks it for a while
def test_google_cloud_storage(ranks: Ranks) -> None:
    with google_store() as environment:
        pool = ranks(1)
        (start, steps), (began, ended) = (pool.run(at, environment, train_at_google, epochs)[0] for epochs in (1, 2))
        assert start == 0 and began == steps and ended == 2 * steps
        assert float(read_weights("gs://bucket/run/last.ckpt")["net.scale"]) > 0
