"""One device and many give the same loss, the same gradients and the same trained parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, Record, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts

Ranks = Callable[[int], ProcessPool]


def fit(
    dtype: torch.dtype, shape: tuple[int, int, int], batch_size: int, module: dict[str, Any], **strategy: Any
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Two optimizer steps of two micro-batches each, under one sequence-parallel group of all ranks."""
    record = Record()
    with lifted_float_casts() if dtype is torch.float64 else nullcontext():
        torch.manual_seed(3)
        trainer = pl.Trainer(
            strategy=SequenceParallelDDPStrategy(**strategy),
            accelerator="cpu",
            devices=torch.distributed.get_world_size(),
            precision="64-true" if dtype is torch.float64 else "32-true",
            accumulate_grad_batches=2,
            max_steps=2,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = RectifiedFlow(own_noise=True, **module)
        trainer.fit(model, DataLoader(Clips(shape, dtype), batch_size=batch_size))
    return record.losses, record.gradients, {name: p.detach() for name, p in model.named_parameters()}


CASES = {
    "even": ((2, 4, 4), 2, {"checkpointing": False, "per_token_timesteps": False}),
    "checkpointing": ((2, 4, 4), 2, {"checkpointing": True, "per_token_timesteps": False}),
    "odd_length": ((3, 6, 10), 1, {"checkpointing": False, "per_token_timesteps": False}),
    "odd_heads": ((1, 4, 6), 2, {"checkpointing": True, "per_token_timesteps": True, "num_attention_heads": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_training_on_one_two_and_four_ranks(ranks: Ranks, case: str) -> None:
    losses, gradients, parameters = ranks(1).run(fit, torch.float64, *CASES[case])[0]
    assert len(losses) == 4
    assert len(gradients) == 2
    for size in (2, 4):
        for got_losses, got_gradients, got_parameters in ranks(size).run(fit, torch.float64, *CASES[case]):
            assert got_losses == pytest.approx(losses, rel=1e-10)
            for got, expected in zip(got_gradients, gradients, strict=True):
                assert gradient_error(got, expected) <= 1e-10
            assert gradient_error(got_parameters, parameters) <= 1e-10


RINGS = {"ring": {"ulysses_size": 1, "ring_size": 4}, "usp": {"ulysses_size": 2, "ring_size": 2}}
# The pairs that differ most; `make test-full` runs all.
PAIRS = [("usp", "odd_length"), ("ring", "odd_heads"), ("usp", "checkpointing")]


@pytest.mark.parametrize("strategy_checkpointing", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("mesh", "case"),
    [
        pytest.param(*pair, marks=[] if pair in PAIRS else [pytest.mark.full])
        for pair in itertools.product(RINGS, CASES)
    ],
)
def test_same_training_with_a_ring(ranks: Ranks, mesh: str, case: str, strategy_checkpointing: bool) -> None:
    shape, batch_size, module = CASES[case]
    if strategy_checkpointing:
        module = module | {"checkpointing": False}
    losses, gradients, parameters = ranks(1).run(fit, torch.float64, shape, batch_size, module)[0]
    strategy = RINGS[mesh] | {"activation_checkpointing": strategy_checkpointing}
    for got_losses, got_gradients, got_parameters in ranks(4).run(
        fit, torch.float64, shape, batch_size, module, **strategy
    ):
        assert got_losses == pytest.approx(losses, rel=1e-10)
        for got, expected in zip(got_gradients, gradients, strict=True):
            assert gradient_error(got, expected) <= 1e-10
        assert gradient_error(got_parameters, parameters) <= 1e-10


def test_float32_as_the_model_stands(ranks: Ranks) -> None:
    shape, batch_size, module = CASES["odd_length"]
    losses, gradients, _ = ranks(1).run(fit, torch.float32, shape, batch_size, module)[0]
    for size in (2, 4):
        for got_losses, got_gradients, _ in ranks(size).run(fit, torch.float32, shape, batch_size, module):
            assert got_losses == pytest.approx(losses, rel=1e-5)
            # The first step only: AdamW turns the rounding of near-zero gradients into whole steps of the weights.
            assert gradient_error(got_gradients[0], gradients[0]) <= 1e-5


def test_the_gradient_rule_can_be_seen_to_matter() -> None:
    """The comparison used above notices a gradient that is off by the number of ranks, or one in a thousand."""
    reference = {"a": torch.ones(3, dtype=torch.float64), "b": torch.full((2,), 1e-9, dtype=torch.float64)}
    for factor, name in itertools.product((2.0, 1.001), "a"):
        assert gradient_error(reference | {name: reference[name] * factor}, reference) > 1e-4
