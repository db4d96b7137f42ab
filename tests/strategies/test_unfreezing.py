"""Parameters that were frozen when the model was set up, or made later, and train: nobody averages their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy
from tests.distributed.parity import SGDFlow
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import all_assembled
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]
STRATEGIES = ["ddp", pytest.param("zero2", marks=needs_deepspeed)]


class Thawing(pl.Callback):
    """Lets the first block train from the second epoch on."""

    def __init__(self, frozen_from: str) -> None:
        self.frozen_from = frozen_from

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._set(pl_module, self.frozen_from != "setup")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set(pl_module, False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set(pl_module, trainer.current_epoch > 0)

    def _set(self, module: Any, trains: bool) -> None:
        module.transformer.blocks[0].requires_grad_(trains)


def fit(strategy: str, frozen_from: str) -> dict[str, Tensor] | str:
    with deepspeed_on_cpu():
        selected: Any = (
            ddp(find_unused_parameters=True) if strategy == "ddp" else SequenceParallelDeepSpeedStrategy(stage=2)
        )
        kwargs: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 1, "callbacks": [Thawing(frozen_from)]}
        module = SGDFlow()
        try:
            trainer(selected, use_distributed_sampler=False, **kwargs).fit(module, clips())
        except ValueError as error:
            return str(error)
    return all_assembled(module.named_parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_frozen_before_it_was_set_up_cannot_train_later(ranks: Ranks, strategy: str) -> None:
    message = ranks(2).run(fit, strategy, "setup")[0]
    assert "'transformer.blocks.0.scale_shift_table'" in message
    assert "frozen" in message


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_frozen_afterwards_can(ranks: Ranks, strategy: str) -> None:
    (expected,) = ranks(1).run(fit, "ddp", "fit_start")
    for parameters in ranks(2).run(fit, strategy, "fit_start"):
        assert gradient_error(parameters, expected) < 1e-4


class Late(SGDFlow):
    """Trains a parameter that it makes with the optimizer, when DDP is set up."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().configure_optimizers()
        self.late = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [self.late]})
        return optimizer


def fit_late() -> str:
    try:
        trainer(ddp(), max_steps=1).fit(Late(), clips())
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_is_made_afterwards_cannot_train(ranks: Ranks) -> None:
    message = ranks(2).run(fit_late)[0]
    assert "'late'" in message
    assert "configure_model" in message
    assert ranks(1).run(fit_late) == ["no error"]


class Head(SGDFlow):
    """Scales what a network makes, and trains the scale alone at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.transformer  # as Lightning's callback wants it called
        self.scale = nn.Linear(1, 1)
        nn.init.constant_(self.scale.weight, 0.5)
        nn.init.zeros_(self.scale.bias)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.scale(super().loss(batch).view(1)).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.scale.parameters(), lr=0.01)


class LateFreezing(BackboneFinetuning):
    """Freezes when DDP is set up, and averages the gradients of what trains later too."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pass

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.freeze_before_training(pl_module)
        super().on_fit_start(trainer, pl_module)


def finetune(strategy: str, **settings: Any) -> dict[str, Tensor] | str:
    selected, kind = (fsdp2, BackboneFinetuning) if strategy == "fsdp2" else (ddp, LateFreezing)
    callback = kind(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    kwargs: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 2, "callbacks": [callback]}
    module = Head()
    try:
        trainer(selected(**settings), use_distributed_sampler=False, **kwargs).fit(module, clips())
    except RuntimeError as error:
        return " ".join([str(error), *error.__notes__])
    return all_assembled(module.named_parameters())


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("fsdp2", {"shard_frozen": ["transformer"]}), ("ddp", {"find_unused_parameters": True})],
)
def test_lightnings_finetuning_trains_as_on_one_device(ranks: Ranks, strategy: str, settings: dict[str, Any]) -> None:
    (expected,) = ranks(1).run(finetune, "ddp", find_unused_parameters=True)
    assert not torch.equal(expected["transformer.proj_out.weight"], Head().transformer.proj_out.weight)
    for parameters in ranks(2).run(finetune, strategy, **settings):
        assert gradient_error(parameters, expected) < 1e-4


def test_lightnings_finetuning_of_what_is_kept_whole_says_what_to_do(ranks: Ranks) -> None:
    for message in ranks(2).run(finetune, "fsdp2"):
        assert "shard_frozen=[...]" in message and "more were frozen, hence kept whole" in message
