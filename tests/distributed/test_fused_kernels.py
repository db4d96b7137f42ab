"""Fused kernels under sequence parallelism: the gradients of one device without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import FusedKernels
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.callbacks.toy import trainer_with
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, Record, RectifiedFlow
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
        assert len(replaced) == 7  # two blocks with two attentions each, and the timesteps' embedding
        assert got_losses == pytest.approx(losses, rel=1e-10)
        # Each rank sums scale and shift gradients over its own tokens only; DDP's average must complete them once.
        assert gradient_error(got_gradients, gradients) <= 1e-10
