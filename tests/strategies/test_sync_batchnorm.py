"""``Trainer(sync_batchnorm=True)``, which Lightning's own strategies for sharded parameters pass over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.strategies.fsdp2.training import clips, trainer

Ranks = Callable[[int], ProcessPool]


class Normalized(RectifiedFlow):
    """Its BatchNorm runs in ``eval()``: what synchronizes needs GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(4)
        self.kinds: list[str] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.kinds.append(type(self.norm).__name__)
        return super().training_step(batch | {"noise": self.norm.eval()(batch["noise"])})


def kinds_in_two_fits(strategy: str) -> list[str]:
    module = Normalized()
    with deepspeed_on_cpu():
        runner = trainer(strategy, sync_batchnorm=True, max_steps=1)
        runner.fit(module, clips())
        runner.fit_loop.epoch_loop.max_steps = 2
        runner.fit(module, clips())
    return module.kinds


@pytest.mark.parametrize(
    "strategy", ["ulysses_fsdp2", pytest.param("ulysses_deepspeed_stage_2", marks=needs_deepspeed)]
)
def test_batch_norms_are_synchronized(ranks: Ranks, strategy: str) -> None:
    for first, second in ranks(2).run(kinds_in_two_fits, strategy):
        assert "SyncBatchNorm" in first and "SyncBatchNorm" in second
