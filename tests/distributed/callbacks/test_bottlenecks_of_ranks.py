"""BottleneckAnalyzer over two gloo processes: a slow rank, a slow exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import BottleneckAnalyzer
from lightning_videoscale.parallel import CollectiveTransport
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.timing.slow_training import Pace, train

Ranks = Callable[[int], ProcessPool]

pytestmark = pytest.mark.timed


def findings_of_ranks(strategy: str, paces: list[Pace]) -> list[dict[str, Any]]:
    analyzer = BottleneckAnalyzer(every_n_steps=3)
    train(strategy, paces, micro_batches=3, callbacks=(analyzer,))
    return analyzer.history


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.full), "fsdp2"])
def test_a_slow_rank_is_named(ranks: Ranks, strategy: str) -> None:
    first, second = ranks(2).run(findings_of_ranks, strategy, [Pace(forward=0.9), Pace(forward=0.06)])
    assert first == second, "every rank comes to the same judgement"
    [finding] = first
    assert finding["name"] == "straggler"
    assert finding["seconds"]["straggler"] == pytest.approx(0.42, abs=0.06)  # one of two ranks waits for 840 ms
    assert "rank 0 is the last in 100%" in finding["figure"]
    assert "nearly always rank 0" in finding["advice"]


def test_a_rank_that_is_late_because_of_its_loader_is_named_for_it(ranks: Ranks) -> None:
    for findings in ranks(2).run(findings_of_ranks, "ddp", [Pace(), Pace(data=0.6, forward=0.06)]):
        assert [finding["name"] for finding in findings] == ["data"]


def findings_with_a_slow_exchange() -> list[dict[str, Any]]:
    exchange = CollectiveTransport.exchange

    def slow_exchange(*args: Any) -> torch.Tensor:
        time.sleep(0.04)
        return exchange(*args)

    analyzer = BottleneckAnalyzer()
    with patch.object(CollectiveTransport, "exchange", slow_exchange):
        trainer = pl.Trainer(
            strategy=SequenceParallelDDPStrategy(ulysses_size=2),
            accelerator="cpu",
            devices=2,
            max_steps=2,
            callbacks=[analyzer],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(RectifiedFlow(), DataLoader(Clips((2, 4, 4), torch.float32)))
    return analyzer.history


def test_a_slow_exchange_is_named(ranks: Ranks) -> None:
    for findings in ranks(2).run(findings_with_a_slow_exchange):
        [finding] = findings
        assert finding["name"] == "exchange"
        assert finding["seconds"]["exchange"] >= 8 * 0.04  # two of forward and two of backward in each of two layers
