"""benchmark_shapes under real DeepSpeed: steps are measured, and nothing of them is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.cost.benchmark.measure_shapes import measure_shapes
from lightning_videoscale.cost.matrix import ShapeMatrix
from lightning_videoscale.data import RandomBatches
from tests.cost.benchmark.flow import SHAPES, Flow
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed

pytestmark = needs_deepspeed

Ranks = Callable[[int], ProcessPool]
CELLS = [Cell(SHAPES[0], 4, 1), Cell(SHAPES[1], 16, 1), Cell(SHAPES[2], 48, 2)]


class Measuring(pl.Callback):
    """Measures when training starts."""

    matrix: ShapeMatrix

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.matrix = measure_shapes(trainer, CELLS, RandomBatches(4), seconds=0.01, progress=False)


class Quiet(Flow):
    """Draws nothing, so that steps after a measurement are those without one."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        torch.manual_seed(batch_idx)
        return super().training_step(batch, batch_idx)


def _weights(strategy: str, measured: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    with deepspeed_on_cpu():
        torch.manual_seed(0)
        module, measuring = Quiet(), Measuring()
        batch = RandomBatches(4)(CELLS[1])
        callbacks = [measuring] if measured else []
        trainer = trainer_with(strategy=strategy, devices=2, max_steps=2, callbacks=callbacks)
        trainer.fit(module, DataLoader([batch] * 2, batch_size=None))
        rows = [row.outcome for row in measuring.matrix.rows] if measured else []
        return copy.deepcopy(module.state_dict()), rows


@pytest.mark.parametrize("stage", [1, 2])
def test_training_after_a_measurement_is_as_without(ranks: Ranks, stage: int) -> None:
    strategy = f"ulysses_deepspeed_stage_{stage}"
    measured, rows = ranks(2).run(_weights, strategy, True)[0]
    without, _ = ranks(2).run(_weights, strategy, False)[0]
    assert rows == ["measured"] * len(CELLS)
    assert measured.keys() == without.keys()
    for name, weights in without.items():
        assert torch.equal(measured[name], weights), name
