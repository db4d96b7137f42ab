"""LossWeighting: the gradient of the weighted loss, exactly once."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_videoscale.data.loading.loss_weighting import LossWeighting
from lightning_videoscale.parallel.mesh import host_group
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with


def test_scales_the_gradient_and_not_the_logged_loss() -> None:
    module, trainer = Slope(), trainer_with(LossWeighting())
    trainer.fit(module, batches_of([Meta(2, 10, loss_weight=0.5), Meta(2, 10), Meta(2, 10, loss_weight=0.0)]))
    assert module.gradients == [0.5 * 1.0, 1.0 * 2.0, 0.0]
    slope = -0.1 * (0.5 + 2.0)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(3.0 * slope)


def test_weighted_micro_batches_give_the_mean_over_all_samples() -> None:
    # Three samples of value 1, one of value 2: their mean is 5 / 4. Weights are B * (micro-batches) / samples.
    module = Slope()
    trainer = trainer_with(LossWeighting(), accumulate_grad_batches=2)
    trainer.fit(module, batches_of([Meta(3, 10, loss_weight=3 * 2 / 4), Meta(1, 10, loss_weight=1 * 2 / 4)]))
    assert module.gradients == [1.25]


class WeighingStrategy(SingleDeviceStrategy):
    """Stands for a strategy of ours: it knows its place and promises to weigh the loss itself."""

    data_parallel_rank, data_parallel_size, sequence_parallel_size, applies_loss_weight = 0, 1, 1, True

    def host_group(self, timeout: timedelta) -> Any:
        return host_group(timeout)


def test_does_nothing_and_says_so_where_the_strategy_weighs() -> None:
    module = Slope()
    trainer = trainer_with(LossWeighting(), strategy=WeighingStrategy(torch.device("cpu")))
    with pytest.warns(UserWarning, match="WeighingStrategy .*meta.loss_weight"):
        trainer.fit(module, batches_of([Meta(2, 10, loss_weight=0.5)]))
    assert module.gradients == [1.0]


def test_a_missing_meta_is_said_once_and_leaves_the_loss() -> None:
    module = Slope()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with(LossWeighting()).fit(module, batches_of([Meta(2, 10, loss_weight=0.5), None, None]))
    assert len([w for w in caught if "LossWeighting found no `meta`" in str(w.message)]) == 1
    assert module.gradients == [0.5, 2.0, 3.0]
