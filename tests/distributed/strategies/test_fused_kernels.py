"""Fused kernels under sequence parallelism: the gradients of one device without them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import FusedKernels
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.callbacks.toy import trainer_with
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, Record, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error, lifted_float_casts

Ranks = Callable[[int], ProcessPool]


def _fit(fused: bool, per_token_timesteps: bool | str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    record, kernels = Record(), FusedKernels()
    with lifted_float_casts():
        torch.manual_seed(3)
        trainer = trainer_with(
            *([record, kernels] if fused else [record]),
            strategy=SequenceParallelDDPStrategy(),
            devices=torch.distributed.get_world_size(),
            precision="64-true",
            max_steps=1,
        )
        model = RectifiedFlow(per_token_timesteps=per_token_timesteps, checkpointing=True)
        trainer.fit(model, DataLoader(Clips((3, 4, 6), torch.float64), batch_size=2))
    replaced = [entry.path for entry in kernels.report.replaced] if kernels.report else []
    return record.losses, record.gradients[0], replaced


@pytest.mark.parametrize("per_token_timesteps", [False, True, "repeated"])
def test_two_ranks_with_kernels_equal_one_without(ranks: Ranks, per_token_timesteps: bool | str) -> None:
    losses, gradients, _ = ranks(1).run(_fit, False, per_token_timesteps)[0]
    for got_losses, got_gradients, replaced in ranks(2).run(_fit, True, per_token_timesteps):
        assert len(replaced) == 9  # two blocks with three parts each, and the timesteps' embedding
        assert got_losses == pytest.approx(losses, rel=1e-10)
        # Each rank sums scale and shift gradients over its own tokens only; DDP's average must complete them once.
        assert gradient_error(got_gradients, gradients) <= 1e-10


def _zero3(**options: Any) -> SequenceParallelDeepSpeedStrategy:
    """With every parameter partitioned; by default ZeRO leaves those as small as here on every rank."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    return SequenceParallelDeepSpeedStrategy(config=config, **options)


def _losses(backend: str, fused: bool, **options: Any) -> list[float]:
    """Of four steps: those after the first tell of the gradients of every parameter."""
    strategies: dict[str, Callable[..., Any]] = {
        "ddp": SequenceParallelDDPStrategy,
        "fsdp2": SequenceParallelFSDP2Strategy,
        "zero3": _zero3,
    }
    losses: list[float] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    with deepspeed_on_cpu() if backend == "zero3" else nullcontext():
        torch.manual_seed(3)
        trainer = trainer_with(
            *([Keep(), FusedKernels(recompute_norms=True)] if fused else [Keep()]),
            strategy=strategies[backend](**options),
            devices=torch.distributed.get_world_size(),
            max_steps=4,
        )
        trainer.fit(RectifiedFlow(), DataLoader(Clips((3, 4, 6), torch.float32), batch_size=2))
    return losses


@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [
        ("ddp", False),
        ("fsdp2", True),
        pytest.param("zero3", True, marks=needs_deepspeed),
        pytest.param("ddp", True, marks=pytest.mark.full),
        pytest.param("fsdp2", False, marks=pytest.mark.full),
        pytest.param("zero3", False, marks=[needs_deepspeed, pytest.mark.full]),
    ],
)
def test_kernels_train_alike_under_every_strategy(ranks: Ranks, backend: str, checkpointing: bool) -> None:
    plain = ranks(1).run(_losses, "ddp", fused=False)[0]
    for fused in ranks(2).run(_losses, backend, fused=True, activation_checkpointing=checkpointing):
        assert fused == pytest.approx(plain, rel=1e-5)
    assert plain[-1] != pytest.approx(plain[0], rel=1e-2)  # the steps did something
