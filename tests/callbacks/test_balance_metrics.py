"""The monitor's figures on scripted times and loads, compared with what is computed by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from lightning_videoscale.callbacks.balance_metrics import BalanceMetrics, MicroBatchLoad
from lightning_videoscale.callbacks.step_window import RankTimes
from lightning_videoscale.cost import TransformerFlops
from lightning_videoscale.data.geometry import GEOMETRIES
from lightning_videoscale.timing import StepTimes


def window(
    dp_ranks: list[int],
    times: list[list[StepTimes]],
    loads: list[list[MicroBatchLoad]],
    micro_batches: list[int],
) -> RankTimes:
    return RankTimes(
        dp_ranks, torch.tensor(times, dtype=torch.float64), torch.tensor(loads, dtype=torch.float64), micro_batches
    )


LONG = MicroBatchLoad(samples=1, tokens=300, counts=1, predicted_cost=3.0, latent_cells=1200)
SHORT = MicroBatchLoad(samples=4, tokens=100, counts=1, predicted_cost=2.0, latent_cells=400)
FILLER = SHORT._replace(counts=0)


def test_two_ranks_of_two_steps_with_accumulation() -> None:
    quick = StepTimes(data=0.1, forward=1.0, backward=2.0, wait=1.5, optimizer=0.4, other=5.0)
    slow = StepTimes(data=0.3, forward=1.5, backward=2.5, wait=0.3, optimizer=0.4, other=5.0)
    metrics = BalanceMetrics(p=2.0)
    figures = metrics.update(
        window(
            [0, 1], [[quick, slow, quick], [slow, quick, slow]], [[LONG, SHORT, SHORT], [LONG, LONG, FILLER]], [2, 1]
        ),
        seconds=20.0,
    )
    # Step 1: both compute 7 s. Step 2: 3 s and 4 s.
    assert figures["balance/cv_step"] == pytest.approx((0.0 + 0.25) / 2)
    # B·S²: step 1 has 90 000 + 40 000 and 180 000; step 2 has 40 000 twice.
    assert figures["balance/compute_cv"] == pytest.approx((25 / 155 + 0.0) / 2)
    assert figures["balance/physical_load"] == pytest.approx((155_000 + 40_000) / 2)
    # Costs: 5 and 6, then 2 and 2.
    assert figures["balance/cost_cv"] == pytest.approx((0.5 / 5.5 + 0.0) / 2)
    assert figures["balance/padding_share"] == pytest.approx(400 / (3 * 300 + 3 * 400))
    # Of three micro-batches in two steps, the mean of both ranks.
    assert figures["time/compute"] == pytest.approx(3 * 3.5 / 2)
    assert figures["time/data"] == pytest.approx(3 * 0.2 / 2)
    assert figures["time/optimizer"] == pytest.approx(3 * 0.4 / 2)
    assert figures["time/reduction"] == pytest.approx(3 * 0.3 / 2)
    assert figures["time/straggler"] == pytest.approx(3 * 0.6 / 2)
    assert figures["time/exchange"] == 0.0
    samples, tokens, cells = 3 * 1 + 2 * 4, 3 * 300 + 2 * 400, 3 * 1200 + 2 * 4 * 400
    assert figures["throughput/samples_per_second"] == samples / 20
    assert figures["throughput/tokens_per_second"] == tokens / 20
    assert figures["throughput/efficiency"] == cells / (20 * 2)
    assert metrics.summary() == pytest.approx(
        {
            "cv_step": 0.125,
            "compute_cv": 25 / 310,
            "cost_cv": 0.5 / 11,
            "padding_share": 400 / 2100,
            "tokens_per_second": 85.0,
            "samples": 11,
            "tokens": 1700,
            "throughput_efficiency": 170.0,
        }
    )


def test_a_sequence_parallel_group_counts_once() -> None:
    quick, slow = StepTimes(forward=1.0, exchange=0.5), StepTimes(forward=2.0, exchange=0.1)
    metrics = BalanceMetrics(p=2.0)
    metrics.flops = (TransformerFlops(layers=1, width=10, ffn_width=20, checkpointing=True), 1e6)
    figures = metrics.update(window([0, 0, 1, 1], [[quick], [slow], [slow], [slow]], [[LONG]] * 4, [1]), seconds=3.0)
    assert figures["balance/cv_step"] == 0.0, "a group takes as long as its slowest rank"
    assert figures["throughput/tokens_per_second"] == 2 * 300 / 3
    assert figures["throughput/samples_per_second"] == 2 / 3
    assert figures["throughput/efficiency"] == 2 * 1200 / (3 * 4), "latent tokens of two groups by four ranks"
    assert figures["time/exchange"] == pytest.approx(0.2)
    # Forward and backward once, without recomputation: 3 · (12 · 10² + 4 · 10 · 20) per token, 3 · 4 · 10 per pair.
    flops = 2 * (300 * 6000 + 300**2 * 120)
    assert figures["throughput/mfu"] == pytest.approx(flops / (3.0 * 4 * 1e6))
    assert metrics.summary()["mfu"] == figures["throughput/mfu"]


def test_the_sums_go_on_after_a_checkpoint() -> None:
    times = [[StepTimes(forward=1.0)], [StepTimes(forward=2.0)]]
    first, whole = BalanceMetrics(p=2.0), BalanceMetrics(p=2.0)
    parts = [window([0, 1], times, [[LONG], [SHORT]], [1]), window([0, 1], times[::-1], [[LONG], [LONG]], [1])]
    for metrics in (first, whole):
        metrics.update(parts[0], seconds=2.0)
    resumed = BalanceMetrics(p=2.0)
    resumed.load_state_dict(first.state_dict())
    for metrics in (resumed, whole):
        metrics.update(parts[1], seconds=4.0)
    assert resumed.summary() == whole.summary()
    assert first.summary() != whole.summary(), "a checkpoint does not share its numbers with who goes on"


class Meta(NamedTuple):
    frames: int
    height: int
    width: int
    samples: int = 2
    sequence_length: int = 50
    loss_weight: float = 1.0
    predicted_cost: float = 1.5


def test_what_is_read_of_a_batch() -> None:
    geometry = GEOMETRIES["wan2.1"]
    latents: Any = {"latents": None, "meta": Meta(21, 60, 104)}
    assert MicroBatchLoad.of(latents, geometry) == (2, 50, 1.0, 1.5, 21 * 60 * 104)
    video: Any = {"video": None, "meta": Meta(81, 480, 832, loss_weight=0.0)}
    assert MicroBatchLoad.of(video, geometry) == (2, 50, 0.0, 1.5, 21 * 60 * 104)
    assert MicroBatchLoad.of({"latents": None}, geometry) is None
