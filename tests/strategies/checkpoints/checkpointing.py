"""A small LightningModule and DataModule with everything that a checkpoint has to carry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

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
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),  # its states have other shapes
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


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
