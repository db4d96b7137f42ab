"""Checkpoints as a user of Lightning meets them: callbacks, optimizers, messages, safety, export."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lightning_videoscale.cli import main
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, checkpoint_folder
from lightning_videoscale.strategies.checkpoint_folder import CheckpointError, CheckpointFolder, read_weights
from lightning_videoscale.strategies.zero_checkpoint import _Shares
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]
NOTHING_TO_SPLIT = SplitPlan({}, {}, {}, lambda model, context: lambda: None)


class Net(nn.Module):
    """Two layers that share their weight, one that is frozen, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scale * self.second(torch.tanh(self.frozen(self.first(x))))


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "stateless": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "lbfgs": lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=0.1, max_iter=2),
}


class Module(pl.LightningModule):
    """Trains with two groups, of which one holds what is frozen."""

    def __init__(self, optimizer: str = "adamw", **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.net, self.optimizer = Net(), optimizer
        self.drawn: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        loss = (self.net(batch) - torch.randn_like(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.net.first.parameters(), *self.net.frozen.parameters()]},
            {"params": [self.net.second.bias, self.net.scale], "lr": 0.05},
        ]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Stateful(pl.LightningDataModule):
    """Counts its epochs."""

    epochs = 0

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), batch_size=2)

    val_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def trainer(epochs: int = 1, **kwargs: Any) -> pl.Trainer:
    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        strategy=SequenceParallelDDPStrategy(modules=["net"], plan=NOTHING_TO_SPLIT),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=epochs,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **(defaults | kwargs),
    )


def fit(epochs: int, module: Module, start: Path | str | None = None, **kwargs: Any) -> pl.Trainer:
    torch.manual_seed(5)
    runner = trainer(epochs, **kwargs)
    runner.fit(module, datamodule=Stateful(), ckpt_path=start)
    return runner


# -- what a resumed run is -----------------------------------------------------------------------------------------


def fit_twice(optimizer: str, folder: Path) -> None:
    uninterrupted, before, after = Module(optimizer), Module(optimizer), Module(optimizer)
    whole = fit(2, uninterrupted)
    fit(1, before).save_checkpoint(folder / "one.ckpt")
    resumed = trainer(2)
    torch.manual_seed(99)  # the checkpoint's seed goes on
    resumed.fit(after, datamodule=Stateful(), ckpt_path=folder / "one.ckpt")
    assert before.drawn + after.drawn == uninterrupted.drawn
    for (name, a), b in zip(after.state_dict().items(), uninterrupted.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert after.net.second.weight is after.net.first.weight
    assert resumed.datamodule.epochs == 1
    assert resumed.global_step == whole.global_step == 8
    assert (
        resumed.lr_scheduler_configs[0].scheduler.get_last_lr() == whole.lr_scheduler_configs[0].scheduler.get_last_lr()
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    ranks(1).run(fit_twice, optimizer, tmp_path)
    folder = CheckpointFolder(tmp_path / "one.ckpt")
    states = {name: list(folder.tensors("optimizer_0", name)) for name in folder.sections("optimizer_0")}
    if optimizer == "adamw":
        assert set(states) == {"net.first.weight", "net.first.bias", "net.second.bias", "net.scale"}
        assert set(states["net.scale"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    elif optimizer == "stateless":
        assert states == {}


class Shuffled(Sampler[int]):
    """Draws from all of the global generators, which the training steps do not."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(8).tolist()
        self.drawn.append((order, np.random.rand(), random.random()))
        return iter(order)


class SaveInside(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def shuffle_twice(folder: Path) -> list[Any]:
    drawn = []
    for epochs, start, end in ((2, None, "whole"), (1, None, "one"), (2, "one", "two")):
        torch.manual_seed(5)
        sampler = Shuffled()
        runner = trainer(epochs, callbacks=[SaveInside(folder / f"{end}.ckpt")], use_distributed_sampler=False)
        loader = DataLoader(torch.zeros(8, 3), batch_size=2, sampler=sampler)
        np.random.seed(1)
        random.seed(1)
        runner.fit(Module(), loader, ckpt_path=folder / f"{start}.ckpt" if start else None)
        drawn.append(sampler.drawn)
    return drawn


def test_the_random_generators_go_on(ranks: Ranks, tmp_path: Path) -> None:
    whole, first, second = ranks(1).run(shuffle_twice, tmp_path)[0]
    assert first + second == whole
    assert whole[0] != whole[1]


# -- Lightning's callbacks and calls -------------------------------------------------------------------------------


def fit_with_callbacks(folder: Path) -> list[Any]:
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", mode="max", save_top_k=2, save_last=True)
    runner = fit(4, Module(), callbacks=[keep], enable_checkpointing=True)
    found = sorted(path.name for path in folder.iterdir())
    resumed = fit(
        5, Module(), start="last", callbacks=[ModelCheckpoint(folder, save_last=True)], enable_checkpointing=True
    )
    best = runner.validate(runner.lightning_module, datamodule=Stateful(), ckpt_path="best", verbose=False)
    return [found, Path(keep.best_model_path).name, resumed.current_epoch, best[0]["val_loss"], keep.best_model_score]


def test_model_checkpoint_keeps_and_deletes_folders(ranks: Ranks, tmp_path: Path) -> None:
    found, best, epoch, loss, score = ranks(1).run(fit_with_callbacks, tmp_path)[0]
    assert len(found) == 3
    assert "last.ckpt" in found
    assert best in found
    assert epoch == 5
    assert loss == pytest.approx(float(score))


def fit_with_links(folder: Path) -> list[Any]:
    callbacks = [ModelCheckpoint(folder, "{epoch}", save_last="link", save_top_k=1)]
    fit(3, Module(), callbacks=callbacks, enable_checkpointing=True)
    runner = fit(4, Module(), start="last", callbacks=callbacks, enable_checkpointing=True)
    return [sorted(path.name for path in folder.iterdir()), runner.current_epoch]


def test_last_can_be_a_link(ranks: Ranks, tmp_path: Path) -> None:
    found, epoch = ranks(1).run(fit_with_links, tmp_path)[0]
    assert found == ["epoch=3.ckpt", "last.ckpt"]
    assert epoch == 4


def fit_with_average(folder: Path) -> list[Any]:
    torch.manual_seed(5)
    whole, first, second = (EMAWeightAveraging(decay=0.5) for _ in range(3))
    uninterrupted = fit(2, Module(), callbacks=[whole])
    fit(1, Module(), callbacks=[SaveInside(folder / "one.ckpt"), first])
    resumed = fit(2, Module(), start=folder / "one.ckpt", callbacks=[second])
    return [dict(runner.lightning_module.state_dict()) for runner in (uninterrupted, resumed)]


def test_averaged_weights_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    uninterrupted, resumed = ranks(1).run(fit_with_average, tmp_path)[0]
    for name, value in uninterrupted.items():
        assert torch.equal(value, resumed[name]), name
    rest = CheckpointFolder(tmp_path / "one.ckpt").rest
    assert not torch.equal(rest["current_model_state"]["net.scale"], read_weights(tmp_path / "one.ckpt")["net.scale"])


def save_weights_only(folder: Path) -> list[str]:
    module = Module()
    runner = fit(1, module)
    runner.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    other = Module()
    runner = trainer()
    runner.validate(other, datamodule=Stateful(), ckpt_path=folder / "weights.ckpt", verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))
    return message(lambda: fit(2, Module(), start=folder / "weights.ckpt"))


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_weights_only(ranks: Ranks, tmp_path: Path) -> None:
    assert "checkpoint contains only the model" in ranks(1).run(save_weights_only, tmp_path)[0]
    assert CheckpointFolder(tmp_path / "weights.ckpt").sections("optimizer_0") == []


class Cleaning(Module):
    """Leaves what is frozen out of its checkpoints, and puts it back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "frozen" not in k}
        checkpoint["note"] = {"about": "a hook"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["note"] == {"about": "a hook"}
        checkpoint["state_dict"] |= {k: v for k, v in self.state_dict().items() if "frozen" in k}
        checkpoint["state_dict"]["net.scale"] = checkpoint["state_dict"]["net.scale"] + 7


def save_and_clean(folder: Path) -> list[float]:
    module, other = Cleaning(), Cleaning()
    fit(1, module).save_checkpoint(folder / "one.ckpt")
    trainer().validate(other, datamodule=Stateful(), ckpt_path=folder / "one.ckpt", verbose=False)
    return [float(module.net.scale), float(other.net.scale)]


def test_hooks_of_the_lightning_module_see_and_change_the_state_dict(ranks: Ranks, tmp_path: Path) -> None:
    saved, loaded = ranks(1).run(save_and_clean, tmp_path)[0]
    assert loaded == pytest.approx(saved + 7)
    assert not any("frozen" in name for name in read_weights(tmp_path / "one.ckpt"))


def save_plainly(folder: Path) -> None:
    module = Module()
    runner = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    runner.fit(module, datamodule=Stateful())
    runner.save_checkpoint(folder / "plain.ckpt")
    other = Module()
    resumed = trainer(1)
    resumed.fit(other, datamodule=Stateful(), ckpt_path=folder / "plain.ckpt")  # nothing is left to train
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))
    for mine, theirs in zip(resumed.optimizers[0].state.values(), runner.optimizers[0].state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_a_file_of_lightnings_ddp_is_taken(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save_plainly, tmp_path)
    assert "first.weight" in read_weights(tmp_path / "plain.ckpt", "net")


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
    assert "size mismatch for net.frozen.weight" in names
    assert "['net.first.bias'] had a state there and are not in it now" in group
    assert "['net.second.bias'] are new" in group
    assert "optimizer has 2 parameter groups, and this one has 1" in groups
    assert "is not a checkpoint of lightning-videoscale: it holds [], and ['meta.pt', '.metadata'] is missing" in empty
    assert "nothing is there" in nothing
    assert "it has no 'state_dict'" in other
    assert "s3://bucket/one.ckpt is not" in remote


class Unsafe:
    """Something that only a pickle can hold."""


def save_unsafe(folder: Path) -> list[str]:
    fit(1, Module(what=Unsafe())).save_checkpoint(folder / "one.ckpt")
    refused = message(lambda: fit(2, Module(), start=folder / "one.ckpt"))
    with torch.serialization.safe_globals([Unsafe]):
        return [refused, message(lambda: fit(2, Module(), start=folder / "one.ckpt"))]


def test_objects_are_not_unpickled_unless_told_so(ranks: Ranks, tmp_path: Path) -> None:
    refused, accepted = ranks(1).run(save_unsafe, tmp_path)[0]
    assert "test_checkpoint.Unsafe" in refused
    assert "add_safe_globals" in refused
    assert accepted == "no error"


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    checkpoint_folder.write_checkpoint(tmp_path / "one.ckpt", {"state_dict": {"x": torch.zeros(2)}}, {})
    (tmp_path / "one.ckpt" / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"names posix\.system, which has no place there"):
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


# -- export --------------------------------------------------------------------------------------------------------


class Video(pl.LightningModule):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.transformer = tiny_wan(**config)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.transformer(batch, torch.full((len(batch),), 500.0), torch.ones(len(batch), 5, 16)).sample.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_video(folder: Path) -> Tensor:
    module = Video()
    strategy = SequenceParallelDDPStrategy(activation_checkpointing=True)
    runner = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(module, DataLoader(torch.ones(2, 4, 2, 4, 4), batch_size=1))
    runner.save_checkpoint(folder / "video.ckpt")
    return look(module.transformer)


@torch.no_grad()
def look(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    clip, text = torch.randn(1, 4, 2, 4, 4, generator=generator), torch.randn(1, 5, 16, generator=generator)
    return model.eval()(clip, torch.tensor([300.0]), text).sample


def test_export_for_from_pretrained(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ranks(1).run(train_video, tmp_path)[0]
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "wan")]) == 0
    assert "transformer ->" in capsys.readouterr().out
    model = WanTransformer3DModel.from_pretrained(tmp_path / "wan")
    assert torch.equal(look(model), expected)
    assert not torch.equal(look(tiny_wan()), expected)
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "vae"), "--module", "vae"]) == 1
    assert "holds these diffusers models: ['transformer']" in capsys.readouterr().err.replace("\n", " ")
    fresh = tiny_wan()
    fresh.load_state_dict(read_weights(tmp_path / "video.ckpt", "transformer"))
    assert torch.equal(look(fresh), expected)
    with pytest.raises(CheckpointError, match=r"no weights of a module 'vae'; it has those of \['transformer'\]"):
        read_weights(tmp_path / "video.ckpt", "vae")


# -- dealing out ---------------------------------------------------------------------------------------------------


def test_ranks_take_about_equal_shares_of_what_is_assembled() -> None:
    shares, held = _Shares(3), [0, 0, 0]
    for elements in (100, 5, 60, 40, 30, 10, 1):
        held[shares.next(elements)] += elements
    assert max(held) == 100
    assert sum(held) == 246
    assert min(held) >= 60
