"""What is no good checkpoint is refused with a message, runs no code, and never takes a good one's place."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from lightning_videoscale.strategies.checkpoints import places
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder, pack, read_weights, write_checkpoint
from lightning_videoscale.strategies.checkpoints.places import place_of
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
    tries += [(Module(), "memory://bucket/one.ckpt")]
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
    assert "memory://bucket/one.ckpt" in remote and "nothing is there" in remote


class NoCheckpoints(TorchCheckpointIO):
    """A plugin that a user may have written."""


def train_where_nothing_can_be_kept(folder: Path) -> list[tuple[str, int]]:
    """The message for each, and the steps that were trained before it."""
    said = []
    for kwargs in (
        {"default_root_dir": "memory://runs", "enable_checkpointing": False},
        {"default_root_dir": folder, "callbacks": [ModelCheckpoint("memory://checkpoints", every_n_train_steps=1)]},
        {"default_root_dir": "nobodys://runs", "enable_checkpointing": False},
        {"default_root_dir": folder, "plugins": [NoCheckpoints()]},
        {"default_root_dir": folder, "plugins": [AsyncCheckpointIO(NoCheckpoints())]},
        {"plugins": [AsyncCheckpointIO()], "callbacks": [ModelCheckpoint(folder, save_last="link")]},
    ):
        runner = trainer(1, **{"enable_checkpointing": True} | kwargs)
        text = message(lambda runner=runner: runner.fit(Module(), datamodule=Stateful()))
        said.append((text, runner.global_step))
    return said


def test_where_no_checkpoints_can_be_kept_is_said_before_training(ranks: Ranks, tmp_path: Path) -> None:
    """What one process has in memory, no other sees."""
    for said in ranks(2).run(train_where_nothing_can_be_kept, tmp_path):
        root, model_checkpoint, unknown, plugin, wrapped, link = (text for text, _ in said)
        assert "CheckpointError" in root and "default_root_dir" in root and "memory://runs" in root
        assert "Ranks [1] do not see" in root
        assert "CheckpointError" in model_checkpoint and "dirpath of ModelCheckpoint" in model_checkpoint
        assert "CheckpointError" in unknown and "nobodys" in unknown
        assert "NoCheckpoints" in plugin and "NoCheckpoints" in wrapped
        assert "CheckpointError" in link and "save_last='link'" in link
        assert all(steps == 0 for _, steps in said)


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
    place = place_of(str(tmp_path / "one.ckpt"), "")
    write_checkpoint(place, {"state_dict": {"x": torch.zeros(2)}}, pack({}, place))
    (tmp_path / "one.ckpt" / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        CheckpointFolder(tmp_path / "one.ckpt")


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text("file,caption\n")
    with pytest.raises(CheckpointError, match=r"captions\.csv.*trainer\.save_checkpoint"):
        read_weights(tmp_path / "captions.csv")


def written(path: str | Path, value: float = 0.0) -> None:
    place = place_of(str(path), "")
    write_checkpoint(place, {"state_dict": {"x": torch.full((2,), value)}}, pack({"state_dict": {}}, place))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt"])
@pytest.mark.parametrize("left", [0, -100])
def test_a_part_of_a_file_is_named(tmp_path: Path, name: str, left: int) -> None:
    written(tmp_path / "cut.ckpt")
    file = tmp_path / "cut.ckpt" / name
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"cut\.ckpt"):
        read_weights(tmp_path / "cut.ckpt")


@pytest.mark.parametrize("outside", ["../../private/one.ckpt/", "{tmp_path}/private/one.ckpt/"])
def test_a_checkpoint_reads_no_files_of_others(tmp_path: Path, outside: str) -> None:
    written(tmp_path / "private" / "one.ckpt", 1.0)
    written(tmp_path / "given" / "one.ckpt")
    file = tmp_path / "given" / "one.ckpt" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = outside.format(tmp_path=tmp_path) + stored.relative_path
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"private/one\.ckpt"):
        read_weights(tmp_path / "given" / "one.ckpt")


@pytest.mark.parametrize("outside", ["../private/one.ckpt", "../one.ckpt", "/one.ckpt", "{tmp_path}/private/one.ckpt"])
def test_a_file_that_names_a_folder_of_tensors_names_its_own(tmp_path: Path, outside: str) -> None:
    written(tmp_path / "private" / "one.ckpt", 1.0)
    (tmp_path / "given").mkdir()
    named = {"state_dict": {}, "lightning_videoscale/tensors_in": outside.format(tmp_path=tmp_path)}
    torch.save(named, tmp_path / "given" / "one.ckpt")
    with pytest.raises(CheckpointError, match=r"one\.ckpt.*not in its folder"):
        read_weights(tmp_path / "given" / "one.ckpt")


def test_a_checkpoint_takes_the_place_of_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    written(tmp_path / "run")  # an empty one
    written(tmp_path / "run", 1.0)
    assert read_weights(tmp_path / "run")["x"].tolist() == [1.0, 1.0]
    written(tmp_path / "all" / "one.ckpt", 2.0)
    with pytest.raises(CheckpointError, match=r"one\.ckpt"):
        written(tmp_path / "all")
    assert read_weights(tmp_path / "all" / "one.ckpt")["x"].tolist() == [2.0, 2.0]


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    written("~/one.ckpt", 1.0)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["one.ckpt"]
    assert read_weights("~/one.ckpt")["x"].tolist() == [1.0, 1.0]
    places.remove("~/one.ckpt")
    assert not any((tmp_path / "home").iterdir()) and not any((tmp_path / "here").iterdir())


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
        places._replace = die
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


# -- after an exception --------------------------------------------------------------------------------------------


class Failing(Module):
    def training_step(self, batch: Any) -> Any:
        if self.global_step == 1:
            raise ValueError("the data end here")
        return super().training_step(batch)


def fail_beside_callbacks_that_save_then(folder: Path) -> tuple[list[str], list[str], list[bool]]:
    callbacks = [ModelCheckpoint(folder / "a", save_on_exception=True), OnExceptionCheckpoint(folder / "b")]
    runner = trainer(callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = message(lambda: runner.fit(Failing(), datamodule=Stateful()))
    said = [error, *(str(each.message) for each in caught if "saves nothing after an error" in str(each.message))]
    saved = [path.name for path in folder.rglob("*.ckpt")]
    return said, saved, ["on_exception" in vars(callback) for callback in callbacks]


def test_nobody_begins_a_checkpoint_after_an_error_to_which_others_would_not_come(ranks: Ranks, tmp_path: Path) -> None:
    (said, saved, replaced), _ = ranks(2).run(fail_beside_callbacks_that_save_then, tmp_path)
    assert said[0] == "ValueError: the data end here" and len(said) == 3
    assert "ModelCheckpoint(save_on_exception=True)" in said[1] and "OnExceptionCheckpoint" in said[2]
    assert not saved and not any(replaced)
