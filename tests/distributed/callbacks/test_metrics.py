"""Metrics that two gloo processes update with different steps: synced, they are those of all steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_videoscale.metrics import ModelFlopsUtilization, PaddingShare, PhysicalLoad, ThroughputEfficiency
from tests.distributed.pool import ProcessPool


def _sync() -> dict[str, float]:
    rank = torch.distributed.get_rank()
    efficiency, load, utilization, padding = (
        ThroughputEfficiency(),
        PhysicalLoad(),
        ModelFlopsUtilization(peak_flops_per_second=10.0),
        PaddingShare(),
    )
    efficiency.update(batch_size=1, frames=1, height=8, width=80 * (rank + 1), seconds=1.0 + 2.0 * rank)
    load.update(torch.tensor([1 + 2 * rank]), torch.tensor([10]))
    utilization.update(flops=10.0 * (rank + 1), seconds=2.0 + 2.0 * rank)
    padding.update(torch.tensor(10), torch.tensor(10 + 20 * rank))
    return {
        "efficiency": efficiency.compute().item(),
        "load_mean": load.compute()["mean"].item(),
        "load_max": load.compute()["max"].item(),
        "utilization": utilization.compute().item(),
        "padding": padding.compute().item(),
    }


def test_metrics_sync(ranks: Callable[[int], ProcessPool]) -> None:
    expected = {
        "efficiency": (10 + 20) / (1 + 3),
        "load_mean": 200.0,
        "load_max": 300.0,
        "utilization": (10 + 20) / ((2 + 4) * 10),
        "padding": 20 / (10 + 30),
    }
    assert ranks(2).run(_sync) == [expected, expected]
