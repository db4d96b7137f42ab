"""What is no good checkpoint is refused with a message, runs no code, and never takes a good one's place."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_videoscale.strategies.checkpoints import folder as checkpoint_folder
from lightning_videoscale.strategies.checkpoints.folder import CheckpointError, CheckpointFolder, read_weights
from lightning_videoscale.strategies.checkpoints.portable import is_remote
from tests.distributed.pool import ProcessPool
from tests.strategies.checkpoints.checkpointing import Module, Stateful, fit, message, trainer

Ranks = Callable[[int], ProcessPool]


# -- messages ------------------------------------------------------------------------------------------------------


class Renamed(Module):
    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.net.third = nn.Linear(2, 2)
        self.net.frozen = nn.Linear(3, 4)
        self.strict_loading = strict


class Trains(Module):
    """As Module, but with the biases in the other groups."""

    def configure_optimizers(self) -> Any:
        groups = [[self.net.second.bias, self.net.first.weight], [self.net.first.bias, self.net.scale]]
        return [torch.optim.AdamW([{"params": group} for group in groups])], []


def load_what_does_not_fit(folder: Path) -> list[str]:
    path = folder / "one.ckpt"
    fit(1, Module()).save_checkpoint(path)
    (folder / "empty.ckpt").mkdir()
    (folder / "text.ckpt").write_text("text")
    torch.save({"weights": 1}, folder / "other.ckpt")
    tries = [(Renamed(), path), (Trains(), path), (Module("lbfgs"), path)]
    tries += [(Module(), folder / f"{name}.ckpt") for name in ("empty", "nothing", "other")]
    tries += [(Module(), "s3://bucket/one.ckpt")]
    return [message(lambda module=module, start=start: fit(2, module, start=start)) for module, start in tries]


def test_messages_say_what_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    names, group, groups, empty, nothing, other, remote = ranks(1).run(load_what_does_not_fit, tmp_path)[0]
    assert "net.third.weight" in names
    assert "net.frozen.weight" in names
    assert "['net.first.bias']" in group
    assert "['net.second.bias']" in group
    assert "2 parameter groups" in groups and "has 1" in groups
    assert "holds []" in empty and "['meta.pt', '.metadata']" in empty
    assert "nothing is there" in nothing
    assert "it has no 'state_dict'" in other
    assert "s3://bucket/one.ckpt" in remote


def train_with_remote_folders(folder: Path) -> list[tuple[str, int]]:
    """The message for each, and the steps that were trained before it."""
    said = []
    for kwargs in (
        {"default_root_dir": "memory://runs", "enable_checkpointing": False},
        {"default_root_dir": folder, "callbacks": [ModelCheckpoint("memory://checkpoints", every_n_train_steps=1)]},
    ):
        runner = trainer(1, **{"enable_checkpointing": True} | kwargs)
        text = message(lambda runner=runner: runner.fit(Module(), datamodule=Stateful()))
        said.append((text, runner.global_step))
    return said


def test_remote_folders_are_refused_before_training(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(train_with_remote_folders, tmp_path):
        root, model_checkpoint = said
        assert "default_root_dir" in root[0] and "memory://runs" in root[0]
        assert "'dirpath of ModelCheckpoint': 'memory://checkpoints" in model_checkpoint[0]
        assert all("CheckpointError" in text and steps == 0 for text, steps in said)


@pytest.mark.parametrize("path", ["s3://bucket/a", "s3:/bucket/a", "gs://bucket", "memory://a", "file:///a"])
def test_urls_are_no_folders(path: str) -> None:
    assert is_remote(path)
    assert is_remote(Path(path))


@pytest.mark.parametrize("path", ["/a/b", "a/b:c", "C:/a", "", "."])
def test_folders_are_no_urls(path: str) -> None:
    assert not is_remote(path)


class Unsafe:
    """Something that only a pickle can hold."""


def save_unsafe(folder: Path) -> list[str]:
    fit(1, Module(what=Unsafe())).save_checkpoint(folder / "one.ckpt")
    refused = message(lambda: fit(2, Module(), start=folder / "one.ckpt"))
    with torch.serialization.safe_globals([Unsafe]):
        return [refused, message(lambda: fit(2, Module(), start=folder / "one.ckpt"))]


def test_objects_are_not_unpickled_unless_told_so(ranks: Ranks, tmp_path: Path) -> None:
    refused, accepted = ranks(1).run(save_unsafe, tmp_path)[0]
    assert "test_safety.Unsafe" in refused
    assert "add_safe_globals" in refused
    assert accepted == "no error"


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    checkpoint_folder.write_checkpoint(tmp_path / "one.ckpt", {"state_dict": {"x": torch.zeros(2)}}, {})
    (tmp_path / "one.ckpt" / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        CheckpointFolder(tmp_path / "one.ckpt")


# -- killed while saving -------------------------------------------------------------------------------------------


def save_and_die(folder: Path, where: str) -> None:
    module = Module()
    runner = fit(1, module)
    runner.save_checkpoint(folder / "last.ckpt")
    with torch.no_grad():
        module.net.scale.fill_(-1)

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "before_the_rename":
        checkpoint_folder._replace = die
    else:  # the old one has moved away, the new one has not come
        rename, renamed = Path.rename, []

        def once(self: Path, target: Any) -> Any:
            return die() if renamed else renamed.append(rename(self, target))

        Path.rename = once
    runner.save_checkpoint(folder / "last.ckpt")


@pytest.mark.parametrize("where", ["before_the_rename", "between_the_renames"])
def test_a_save_that_is_killed_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path, where: str) -> None:
    doomed = ProcessPool(1)
    with pytest.raises(AssertionError, match="rank 0 of 1 failed"):
        doomed.run(save_and_die, tmp_path, where)
    assert float(read_weights(tmp_path / "last.ckpt")["net.scale"]) > 0
    assert ranks(1).run(go_on, tmp_path) == [2]
    left = [path.name for path in tmp_path.iterdir()]
    assert "last.ckpt" in left
    assert not [name for name in left if "partial" in name or "previous" in name]


def go_on(folder: Path) -> int:
    keep = ModelCheckpoint(folder, save_last=True, save_top_k=0)
    runner = fit(2, Module(), start="last", callbacks=[keep], enable_checkpointing=True)
    runner.save_checkpoint(folder / "last.ckpt")
    return runner.current_epoch
