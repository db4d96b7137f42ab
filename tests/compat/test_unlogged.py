"""Steps outside of a Trainer's loop leave nothing in a module's torchmetrics."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torchmetrics import MeanMetric, MetricCollection

from lightning_videoscale.compat.lightning.unlogged import nothing_logged


class Measuring(pl.LightningModule):
    """Has a metric by two names, and a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = self.same = MeanMetric()
        self.several = MetricCollection({"mean": MeanMetric()})

    def step(self, value: float) -> None:
        self.loss.update(value)
        self.same.update(torch.tensor(value))
        self.several.update(value)
        self.log("loss", self.loss)


def test_metrics_are_as_before_and_nothing_is_logged() -> None:
    module = Measuring()
    own = module.loss, module.same, module.several
    module.loss.update(1.0)
    with nothing_logged(module):
        module.step(9.0)
        assert module.loss is module.same
        assert module.loss.compute() == (1 + 9 + 9) / 3
    assert (module.loss, module.same, module.several) == own
    assert module.loss.compute() == 1 and module.several["mean"].update_count == 0
