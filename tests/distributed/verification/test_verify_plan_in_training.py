"""A plan that is verified on the first call leaves no trace in a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
    network_changes,
)
from tests.distributed.pool import ProcessPool
from tests.distributed.verification.networks import Attention, Counter, Network, plan
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed

Ranks = Callable[[int], ProcessPool]


class Block(nn.Module):
    """What could keep a trace: random numbers, a buffer, a gate that is zero, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dropout, self.counter = Attention(), nn.Dropout(0.5), Counter("calls")
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.gate * self.counter(self.dropout(x))


class Training(pl.LightningModule):
    """Has parameters of its own, before the network and after it, which FSDP2 gathers around the network's call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.own = Network(Block(), Block()), nn.Linear(8, 8)
        self.calls = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.calls += 1
        return (self.own(self.net(self.own(batch))) - batch).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


STRATEGIES: dict[str, Any] = {
    "ddp": SequenceParallelDDPStrategy,
    "fsdp2": SequenceParallelFSDP2Strategy,
    "zero3": SequenceParallelDeepSpeedStrategy,
}


def train(strategy: str, verify: bool, **arguments: Any) -> tuple[dict[str, Tensor], list[str], int]:
    """Two steps; parameters and buffers, what was logged of the plan, and how often the user's code ran."""
    lines: list[str] = []
    batches = DataLoader(torch.randn(8, 9, 8, generator=torch.Generator().manual_seed(1)), batch_size=2)
    with (
        deepspeed_on_cpu() if strategy == "zero3" else nullcontext(),
        patch.object(network_changes, "rank_zero_info", lines.append),
    ):
        arguments |= {"stage": 3} if strategy == "zero3" else {}
        module = Training()
        pl.Trainer(
            strategy=STRATEGIES[strategy](
                ulysses_size=2, modules=["net"], plan=plan(), verify_plan=verify, **arguments
            ),
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=2,
            num_sanity_val_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, batches, batches)
        state = {name: weights(x) for name, x in [*module.named_parameters(), *module.named_buffers()]}
    return state, lines, module.calls


def weights(x: Tensor) -> Tensor:
    if hasattr(x, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        x = safe_get_full_fp32_param(x)
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("ddp", {}),
        pytest.param(
            "ddp", {"activation_checkpointing": True, "compile": {"backend": "eager"}}, marks=pytest.mark.full
        ),
        ("fsdp2", {"activation_checkpointing": True}),
        pytest.param("zero3", {}, marks=needs_deepspeed),
    ],
)
def test_training_is_what_it_is_without(ranks: Ranks, strategy: str, arguments: dict[str, Any]) -> None:
    verified, plain = (ranks(2).run(train, strategy, verify, **arguments) for verify in (True, False))
    for (state, _, calls), (expected, _, expected_calls) in zip(verified, plain, strict=True):
        assert all(torch.equal(state[name], x) for name, x in expected.items())
        assert calls == expected_calls
    outputs, gradients = verified[0][1]  # in the sanity check, and in the first step
    assert "Network verified" in outputs
    assert "Network verified" in gradients
    assert verified[1][1] == plain[0][1] == []
