"""Sharded parameters and shared sequences on four ranks train as one device does on all their clips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, Record, RectifiedFlow, assembled
from tests.models import gradient_error, lifted_float_casts

Ranks = Callable[[int], ProcessPool]


class Training(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def fit(
    strategy: Strategy,
    shape: tuple[int, int, int] = (2, 4, 4),
    batch_size: int = 1,
    module: dict[str, Any] | None = None,
    **trainer: Any,
) -> Training:
    """Two optimizer steps in float64; the batch size is that of one data-parallel rank."""
    record = Record()
    with lifted_float_casts():
        torch.manual_seed(3)
        runner = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[DoublePrecision()],
            max_steps=2,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **trainer,
        )
        model = RectifiedFlow(**(module or {}))
        clips = Clips(shape, torch.float64, length=48)
        runner.fit(model, DataLoader(clips, batch_size=batch_size))
    return Training(record.losses, record.gradients, {name: assembled(p) for name, p in model.named_parameters()})


def reference(batch_size: int, **case: Any) -> Training:
    return fit(SequenceParallelDDPStrategy(ulysses_size=1), batch_size=batch_size, **case)


def sharded(dp: int, strategy: dict[str, Any], batch_size: int, **case: Any) -> Training:
    return fit(SequenceParallelFSDP2Strategy(**({"ulysses_size": 4 // dp} | strategy)), batch_size=batch_size, **case)


ODD_LENGTH = {"shape": (3, 6, 10)}
ODD_HEADS = {"module": {"num_attention_heads": 5, "per_token_timesteps": True}}

# (dp, arguments of the strategy, clips per data-parallel rank, the rest of the case)
CASES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "dp4": (4, {}, 1, {"gradient_clip_val": 0.01}),
    "dp4_accumulate": (4, {}, 3, {"accumulate_grad_batches": 2}),
    "dp2_odd_length": (2, {"activation_checkpointing": True}, 1, ODD_LENGTH | {"accumulate_grad_batches": 2}),
    "dp2_hybrid": (2, {"replicas": 2}, 3, ODD_HEADS | {"gradient_clip_val": 0.01}),
    "sp4_odd_heads": (1, {"activation_checkpointing": True, "replicas": 2}, 1, ODD_HEADS),
    "sp4_odd_length": (1, {}, 3, ODD_LENGTH | {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}),
    "sp4_clip_by_value": (1, {"replicas": 4}, 1, {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}),
    "usp": (2, {"ring_size": 2, "ulysses_size": 1}, 1, ODD_LENGTH | {"gradient_clip_val": 0.01}),
    "usp_checkpointing": (1, {"ring_size": 2, "ulysses_size": 2, "activation_checkpointing": True}, 1, ODD_HEADS),
    "sp4_diffusers_checkpointing": (1, {}, 1, {"module": {"checkpointing": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_training_on_one_device_and_on_four_ranks(ranks: Ranks, case: str) -> None:
    dp, strategy, batch_size, settings = CASES[case]
    expected: Training = ranks(1).run(reference, dp * batch_size, **settings)[0]
    results: list[Training] = ranks(4).run(sharded, dp, strategy, batch_size, **settings)
    assert len(expected.gradients) == 2
    # Neighbouring ranks share their clips; the data-parallel ranks together hold those of the one device.
    losses = torch.tensor([result.losses for result in results], dtype=torch.float64)
    assert torch.equal(losses, losses[:: 4 // dp].repeat_interleave(4 // dp, 0))
    assert losses.mean(0).tolist() == pytest.approx(expected.losses, rel=1e-10)
    for result in results:
        for got, wanted in zip(result.gradients, expected.gradients, strict=True):
            assert gradient_error(got, wanted) <= 1e-10
        assert gradient_error(result.parameters, expected.parameters) <= 1e-10
