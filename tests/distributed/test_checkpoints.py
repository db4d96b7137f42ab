"""What one strategy saved, any other continues, on any number of ranks, as if nothing had happened."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
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
from lightning_videoscale.strategies.checkpoint_folder import CheckpointFolder
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error, lifted_float_casts

Ranks = Callable[[int], ProcessPool]


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
            return SequenceParallelDeepSpeedStrategy(self.stage, **sizes)
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


def train(run: Run, epochs: int, dtype: torch.dtype, start: Path | None, end: Path) -> list[float]:
    """Trains up to a number of epochs of two steps of four clips, from a checkpoint to a checkpoint."""
    callback = Losses()
    with ExitStack() as contexts:
        if dtype is torch.float64:
            contexts.enter_context(lifted_float_casts())
        if run.strategy == "zero":
            contexts.enter_context(deepspeed_on_cpu())
        trainer = pl.Trainer(
            strategy=run.create(),
            accelerator="cpu",
            devices=dist.get_world_size(),
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


@pytest.fixture(scope="session")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run, int, torch.dtype], Path]:
    """The checkpoint of a run that went through without a stop."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(run: Run, epochs: int, dtype: torch.dtype) -> Path:
        path = folder / f"{run}_{epochs}_{str(dtype)[6:]}.ckpt"
        if not path.exists():
            ranks(run.ranks).run(train, run, epochs, dtype, None, path)
        return path

    return get


def check(ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run) -> None:
    exact = "zero" not in (first.strategy, second.strategy)
    dtype, tolerance = (torch.float64, 1e-10) if exact else (torch.float32, 1e-6)
    expected = saved(ONE, 2, dtype)
    start, end = saved(first, 1, dtype), tmp_path / "end.ckpt"
    losses = ranks(second.ranks).run(train, second, 2, dtype, start, end)
    uninterrupted = CheckpointFolder(expected).rest["callbacks"]["Losses"]["losses"]
    assert len(uninterrupted) == 4
    for got in losses:
        assert got == pytest.approx(uninterrupted, rel=tolerance)
    assert gradient_error(read(end), read(expected)) <= tolerance
    groups, expected_groups = (CheckpointFolder(p).rest["optimizer_states"][0]["param_groups"] for p in (end, expected))
    for group, expected_group in zip(groups, expected_groups, strict=True):
        assert group["lr"] == pytest.approx(expected_group["lr"])
        assert group["initial_lr"] == expected_group["initial_lr"]
        assert sorted(group["params"]) == sorted(expected_group["params"])


ONE = Run("ddp", 1, 1, 1)
DDP = [Run("ddp", 1, 1, 4), Run("ddp", 2, 1, 2), Run("ddp", 4, 1, 1)]
FSDP2 = [Run("fsdp2", 2, 1, 2), Run("fsdp2", 1, 2, 2)]
ZERO = [Run("zero", 2, 1, 2, 1), Run("zero", 1, 1, 4, 2), Run("zero", 2, 1, 2, 3)]
ALL = [ONE, *DDP, *FSDP2, *ZERO]
SOME = [
    (DDP[0], ONE),
    (ONE, FSDP2[0]),
    (FSDP2[0], DDP[2]),
    (DDP[1], FSDP2[1]),
]
SOME_ZERO = [
    (ZERO[0], ONE),
    (DDP[0], ZERO[0]),
    (ZERO[2], FSDP2[0]),
    (FSDP2[1], ZERO[2]),
    (ZERO[2], ZERO[1]),
    (ZERO[1], DDP[1]),
]


@pytest.mark.parametrize(("first", "second"), SOME, ids=str)
def test_saved_by_one_continued_by_another(ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run) -> None:
    check(ranks, saved, tmp_path, first, second)


@needs_deepspeed
@pytest.mark.parametrize(("first", "second"), SOME_ZERO, ids=str)
def test_saved_by_one_continued_by_another_with_zero(
    ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run
) -> None:
    check(ranks, saved, tmp_path, first, second)


@needs_deepspeed
@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), list(itertools.product(ALL, ALL)), ids=str)
def test_every_pair(ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run) -> None:
    check(ranks, saved, tmp_path, first, second)
