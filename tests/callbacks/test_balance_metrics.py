"""The monitor's figures on scripted times and loads, compared with what is computed by hand."""

from __future__ import annotations

import pytest

from lightning_videoscale.callbacks.balance_metrics import BalanceMetrics
from lightning_videoscale.cost import TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.timing import MicroBatchLoad, StepTimes
from tests.timing.windows import window_of

WAN = GEOMETRIES["wan2.1"]
LONG = MicroBatchLoad(1, 300, loss_weight=1.0, predicted_cost=3.0, frames=3, height=20, width=20)  # 1200 latent cells
SHORT = MicroBatchLoad(4, 100, loss_weight=0.5, predicted_cost=2.0, frames=1, height=20, width=20)
FILLER = SHORT._replace(loss_weight=0.0)


def test_two_ranks_of_two_steps_with_accumulation() -> None:
    quick = StepTimes(data=0.1, forward=1.0, backward=2.0, wait=1.5, optimizer=0.4, other=5.0)
    slow = StepTimes(data=0.3, forward=1.5, backward=2.5, wait=0.3, optimizer=0.4, other=5.0)
    metrics = BalanceMetrics(2.0, WAN)
    figures = metrics.update(
        window_of([[quick, slow, quick], [slow, quick, slow]], [[LONG, SHORT, SHORT], [LONG, LONG, FILLER]], [2, 1]),
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


def test_a_step_in_which_no_rank_worked_is_balanced() -> None:
    """By a clock whose ticks are longer than the step."""
    metrics, quick, slow = BalanceMetrics(2.0, WAN), StepTimes(forward=3.0), StepTimes(forward=4.0)
    figures = metrics.update(window_of([[StepTimes()] * 2] * 2, [[LONG] * 2] * 2, [1, 1]), seconds=1.0)
    assert figures["balance/cv_step"] == 0.0
    metrics.update(window_of([[quick] * 2, [slow] * 2], [[LONG] * 2] * 2, [1, 1]), seconds=1.0)
    assert metrics.summary()["cv_step"] == (0.0 + 0.25) / 2


def test_a_sequence_parallel_group_counts_once() -> None:
    quick, slow = StepTimes(forward=1.0, exchange=0.5), StepTimes(forward=2.0, exchange=0.1)
    metrics = BalanceMetrics(2.0, WAN)
    metrics.flops = (TransformerFlops(layers=1, width=10, ffn_width=20, checkpointing=True), 1e6)
    figures = metrics.update(
        window_of([[quick], [slow], [slow], [slow]], [[LONG]] * 4, dp_ranks=[0, 0, 1, 1]), seconds=3.0
    )
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
    first, whole = BalanceMetrics(2.0, WAN), BalanceMetrics(2.0, WAN)
    parts = [window_of(times, [[LONG], [SHORT]]), window_of(times[::-1], [[LONG], [LONG]])]
    for metrics in (first, whole):
        metrics.update(parts[0], seconds=2.0)
    resumed = BalanceMetrics(2.0, WAN)
    resumed.load_state_dict(first.state_dict())
    for metrics in (resumed, whole):
        metrics.update(parts[1], seconds=4.0)
    assert resumed.summary() == whole.summary()
    assert first.summary() != whole.summary(), "a checkpoint does not share its numbers with who goes on"


def test_exchanges_are_work_and_waits_are_not() -> None:
    group = [[StepTimes(forward=2.0, exchange=2.0)], [StepTimes(forward=2.5, exchange=1.5, wait=9.0)]]
    alone = [[StepTimes(forward=3.0)], [StepTimes(forward=3.0)]]
    figures = BalanceMetrics(2.0, WAN).update(window_of(group + alone, dp_ranks=[0, 0, 1, 1]), seconds=3.0)
    assert figures["balance/cv_step"] == pytest.approx((4.0 - 3.0) / 4.0)


def test_latent_cells_of_pixels_are_those_of_their_latents() -> None:
    pixels = LONG._replace(frames=81, height=480, width=832, has_pixels=1)
    latents = LONG._replace(frames=21, height=60, width=104)
    of_pixels, of_latents = (
        BalanceMetrics(2.0, WAN).update(window_of([[StepTimes(forward=1.0)]], [[load]]), seconds=2.0)
        for load in (pixels, latents)
    )
    assert of_pixels == of_latents
    assert of_pixels["throughput/efficiency"] == 21 * 60 * 104 / 2
