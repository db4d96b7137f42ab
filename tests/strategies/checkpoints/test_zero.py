"""What checkpoints of ZeRO hold beside the tensors that all strategies have, and keep of each rank's share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy, read_weights
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed, skip_without_float16
from tests.strategies.checkpoints.checkpointing import NOTHING_TO_SPLIT

Ranks = Callable[[int], ProcessPool]


class Layers(pl.LightningModule):
    """Four layers and a buffer; at the first scales their gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        self.net.register_buffer("calls", torch.ones(()))

    def training_step(self, batch: Tensor) -> Tensor:
        return 50 * self.net(batch.to(self.net[0].weight.dtype)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Scales(pl.Callback):
    """Notes the loss scale before each step, and what it has seen of overflows."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        engine = trainer.strategy.deepspeed_engine  # type: ignore[attr-defined]
        scaler = vars(engine.optimizer.loss_scaler)
        state = [scaler.get(name) for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")]
        self.seen.append((*state, engine.skipped_steps))


def fit(stage: int, steps: int, module: pl.LightningModule, start: Path | None = None, **kwargs: Any) -> pl.Trainer:
    with deepspeed_on_cpu():
        strategy = SequenceParallelDeepSpeedStrategy(stage, 1, modules=["net"], plan=NOTHING_TO_SPLIT)
        settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        runner = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=torch.distributed.get_world_size(), **settings, **kwargs
        )
        runner.fit_loop.epoch_loop.max_steps = steps
        runner.fit(module, DataLoader(torch.ones(16, 2), batch_size=2), ckpt_path=start)
    return runner


# -- shares --------------------------------------------------------------------------------------------------------


class Renaming(Layers):
    """Saves its weights by other names, and in half of their size."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"my.{name}": x.half() for name, x in checkpoint["state_dict"].items()}


def save_renamed(path: Path) -> None:
    fit(2, 1, Renaming()).save_checkpoint(path)


@needs_deepspeed
def test_a_hook_that_renames_keeps_every_ranks_share(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_renamed, tmp_path / "renamed.ckpt")
    weights = read_weights(tmp_path / "renamed.ckpt")
    assert set(weights) == {f"my.{name}" for name in Layers().state_dict()}
    assert {x.dtype for x in weights.values()} == {torch.float16}


# -- what is frozen after the model is set up ----------------------------------------------------------------------


class Freezing(Layers):
    """Trains all but its first layer, in which it says which module it is."""

    def __init__(self, number: float) -> None:
        super().__init__()
        nn.init.constant_(self.net[0].weight, number)

    def on_fit_start(self) -> None:
        self.net[0].requires_grad_(False)


def save_frozen_and_continue(stage: int, path: Path) -> float:
    fit(stage, 1, Freezing(2.0)).save_checkpoint(path / "first.ckpt")
    fit(stage, 2, Freezing(3.0), path / "first.ckpt").save_checkpoint(path / "second.ckpt")
    return float(read_weights(path / "second.ckpt")["net.0.weight"].mean())


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_frozen_when_fit_starts_is_saved_and_loaded(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    assert ranks(2).run(save_frozen_and_continue, stage, tmp_path) == [2.0, 2.0]


# -- the loss scale ------------------------------------------------------------------------------------------------


def train_in_half(stage: int, steps: int, start: Path | None, end: Path, precision: str = "16-mixed") -> Any:
    scales = Scales()
    fit(stage, steps, Layers(), start, callbacks=[scales], precision=precision).save_checkpoint(end)
    return scales.seen


@needs_deepspeed
def test_the_loss_scale_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    skip_without_float16()
    straight = ranks(2).run(train_in_half, 2, 6, None, tmp_path / "straight.ckpt")[0]
    assert straight[0] == (2**16, 0, -1, 2, 0)
    assert straight[3] == (2**14, 3, 2, 1, 3)
    ranks(2).run(train_in_half, 2, 3, None, tmp_path / "half.ckpt")
    for stage, count in ((1, 1), (3, 2)):
        resumed = ranks(count).run(train_in_half, stage, 6, tmp_path / "half.ckpt", tmp_path / "end.ckpt")[0]
        assert resumed == straight[3:]


@needs_deepspeed
def test_what_was_saved_without_a_loss_scale_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    skip_without_float16()
    ranks(2).run(train_in_half, 2, 1, None, tmp_path / "bfloat16.ckpt", "bf16-mixed")
    resumed = ranks(2).run(train_in_half, 2, 2, tmp_path / "bfloat16.ckpt", tmp_path / "end.ckpt")[0]
    assert resumed == [(2**16, 0, -1, 2, 0)]
