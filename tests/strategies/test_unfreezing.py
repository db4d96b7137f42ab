"""Parameters that were frozen when the model was set up, or made later, and train: nobody averages their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy
from tests.distributed.parity import SGDFlow
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import assembled
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, ddp, trainer

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
    return {name: assembled(p) for name, p in module.named_parameters()}


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
