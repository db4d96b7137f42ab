"""A run that stops and goes on under another strategy, on another number of ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu
from tests.models import lifted_float_casts


@dataclass(frozen=True)
class Run:
    """A strategy and its sizes."""

    strategy: str
    dp: int
    ring: int
    ulysses: int
    stage: int = 0

    @property
    def ranks(self) -> int:
        return self.dp * self.ring * self.ulysses

    def __str__(self) -> str:
        return f"{self.strategy}{self.stage or ''}_{self.dp}{self.ring}{self.ulysses}"

    def create(self) -> Any:
        sizes = {"ulysses_size": self.ulysses, "ring_size": self.ring}
        if self.strategy == "zero":
            # The comparison with the whole network would take as long as all else; test_wan_parity.py has it.
            return SequenceParallelDeepSpeedStrategy(self.stage, **sizes, verify_plan=False)
        return {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}[self.strategy](**sizes)


class Flow(RectifiedFlow):
    """Trains with two groups and leaves a part frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer.condition_embedder.text_embedder.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        others = [p for p in self.parameters() if p.ndim <= 1]
        # An eps of the gradients' size: smaller ones make whole steps of the weights from the rounding of zeros.
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}], lr=1e-2, eps=0.1
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(Callback):
    """The mean over the ranks; in the checkpoint too."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.strategy.reduce(trainer.callback_metrics["loss"], reduce_op="mean")))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def train(
    run: Run,
    epochs: int,
    dtype: torch.dtype,
    start: Path | None,
    end: Path,
    accelerator: str = "cpu",
    precision: Any = None,
) -> list[float]:
    """Trains up to a number of epochs of two steps of four clips, from a checkpoint to a checkpoint."""
    callback = Losses()
    with ExitStack() as contexts:
        if dtype is torch.float64:
            contexts.enter_context(lifted_float_casts())
        if run.strategy == "zero" and accelerator == "cpu":
            contexts.enter_context(deepspeed_on_cpu())
        trainer = pl.Trainer(
            strategy=run.create(),
            accelerator=accelerator,
            devices=dist.get_world_size(),
            precision=precision,
            plugins=[DoublePrecision()] if dtype is torch.float64 else [],
            max_epochs=epochs,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(dist.get_rank())
        trainer.fit(Flow(), DataLoader(Clips((2, 4, 4), dtype), batch_size=4 // run.dp), ckpt_path=start)
        trainer.save_checkpoint(end)
    return callback.losses


def read(path: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint that has an element per element of a parameter."""
    folder = CheckpointFolder(path)
    found = {f"weights {name}": tensor for name, tensor in folder.tensors("state_dict").items()}
    for name in folder.sections("optimizer_0"):
        for key, tensor in folder.tensors("optimizer_0", name).items():
            found[f"{key} {name}"] = tensor
    return found


def groups(path: Path) -> list[tuple[float, float, list[str]]]:
    """Learning rates and the trained parameters of every group."""
    folder = CheckpointFolder(path)
    trained = set(folder.sections("optimizer_0"))
    return [
        (group["lr"], group["initial_lr"], sorted(trained.intersection(group["params"])))
        for group in folder.rest["optimizer_states"][0]["param_groups"]
    ]
