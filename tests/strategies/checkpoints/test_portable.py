"""Checkpoints as a user of Lightning meets them: resumed runs, callbacks, hooks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Sampler

from lightning_videoscale.callbacks import EMA
from lightning_videoscale.strategies import read_weights
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from lightning_videoscale.strategies.checkpoints.zero import RankAssignment
from tests.distributed.pool import ProcessPool
from tests.strategies.checkpoints.checkpointing import OPTIMIZERS, Module, Stateful, fit, message, trainer

Ranks = Callable[[int], ProcessPool]


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


class Reordered(Module):
    """As Module, with the parameters of each group in another order."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*reversed([*self.net.first.parameters(), *self.net.frozen.parameters()])]},
            {"params": [self.net.scale, self.net.second.bias], "lr": 0.05},
        ]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit_and_reorder(folder: Path) -> None:
    whole, reordered = Module(), Reordered()
    fit(2, whole)
    fit(1, Module()).save_checkpoint(folder / "one.ckpt")
    fit(2, reordered, start=folder / "one.ckpt")
    for (name, a), b in zip(reordered.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_order_of_parameters_does_not_matter(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(fit_and_reorder, tmp_path)


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


def test_weights_only(ranks: Ranks, tmp_path: Path) -> None:
    assert "only the model" in ranks(1).run(save_weights_only, tmp_path)[0]
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


def save_with_a_module_among_hyperparameters(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"ignore=\['teacher'\]"):
        fit(1, Module(depth=2, teacher=nn.Linear(2, 2))).save_checkpoint(folder / "last.ckpt")


def test_modules_among_hyperparameters_are_left_out(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save_with_a_module_among_hyperparameters, tmp_path)
    assert CheckpointFolder(tmp_path / "last.ckpt").rest["hyper_parameters"] == {"depth": 2}


class Keeping(Module):
    """Keeps something of its own under a name that others may use."""

    kept: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = {"loss": 0.5}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["averages"]


def save_and_load_averages_of_two_kinds(folder: Path) -> Any:
    fit(1, Keeping(), callbacks=[EMA(0.5)]).save_checkpoint(folder / "one.ckpt")
    module = Keeping()
    fit(2, module, start=folder / "one.ckpt", callbacks=[EMA(0.5)])
    return module.kept


def test_averages_of_the_users_own_are_beside_those_of_weights(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(save_and_load_averages_of_two_kinds, tmp_path) == [{"loss": 0.5}]
    weights, averages = (read_weights(tmp_path / "one.ckpt", averaged=which) for which in (False, True))
    assert weights.keys() == averages.keys() and not torch.equal(weights["net.scale"], averages["net.scale"])


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


# -- dealing out ---------------------------------------------------------------------------------------------------


def test_ranks_take_about_equal_shares_of_what_is_assembled() -> None:
    shares, held = RankAssignment(3), [0, 0, 0]
    for elements in (100, 5, 60, 40, 30, 10, 1):
        held[shares.next(elements)] += elements
    assert max(held) == 100
    assert sum(held) == 246
    assert min(held) >= 60
