"""When ranks wait for each other, by strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.topology import waits_in_every_micro_batch

ONCE_A_STEP = (
    SingleDeviceStrategy(),
    DDPStrategy(),
    SequenceParallelDDPStrategy(),
    DeepSpeedStrategy(stage=1),
    DeepSpeedStrategy(config={"train_micro_batch_size_per_gpu": 1}),
)
IN_EVERY_MICRO_BATCH = (
    FSDPStrategy(),
    ModelParallelStrategy(),
    SequenceParallelFSDP2Strategy(),
    DeepSpeedStrategy(stage=2),
    DeepSpeedStrategy(stage=3),
)


@pytest.mark.parametrize("strategy", ONCE_A_STEP + IN_EVERY_MICRO_BATCH, ids=lambda strategy: type(strategy).__name__)
def test_sharded_parameters_or_gradients_make_ranks_wait_in_every_micro_batch(strategy: Strategy) -> None:
    trainer = SimpleNamespace(strategy=strategy)
    assert waits_in_every_micro_batch(trainer) == (strategy in IN_EVERY_MICRO_BATCH)  # type: ignore[arg-type]
