"""The judgement on scripted times, compared with what is computed by hand."""

from __future__ import annotations

import pytest

from lightning_videoscale.report.bottlenecks import StepShares, Straggler, figure_of, shares_of
from lightning_videoscale.report.bottlenecks import straggler_of as who_is_late
from lightning_videoscale.report.judge import advice_on_bottleneck
from lightning_videoscale.timing import StepTimes
from tests.timing.windows import window_of


def test_what_all_ranks_wait_is_the_exchange_and_the_rest_is_for_the_straggler() -> None:
    quick = StepTimes(data=0.1, forward=1.0, backward=2.0, wait=2.5, exchange=0.4, optimizer=0.5, other=9.0)
    slow = StepTimes(data=0.1, forward=2.0, backward=3.0, wait=0.5, exchange=0.4, optimizer=0.5, other=9.0)
    times = window_of([[quick], [slow]])
    shares = shares_of(times)
    assert shares == pytest.approx((0.1, 0.4 + 0.5, (2.5 - 0.5) / 2, (3.0 + 5.0) / 2, 0.5, 0.0))
    assert shares.total == pytest.approx(quick.total - 9.0) == pytest.approx(slow.total - 9.0)
    assert shares.bottleneck == "straggler"
    assert shares.share("straggler") == pytest.approx(1.0 / 6.5)
    assert who_is_late(times) == pytest.approx((1, 1.0, 5.0 / 3.0))


def test_waiting_for_a_rank_that_waits_for_its_loader_is_waiting_for_data() -> None:
    fed = StepTimes(data=0.0, forward=1.0, wait=1.2)
    starved = StepTimes(data=1.2, forward=1.0, wait=0.0)
    shares = shares_of(window_of([[fed], [starved], [fed]]))
    # 1.2 of one rank and what the other two wait for it.
    assert shares == pytest.approx((1.2, 0.0, 0.0, 1.0, 0.0, 0.0))
    assert shares.bottleneck == "data"


def test_a_late_rank_that_both_loads_and_computes_longer_is_shared_out() -> None:
    first = StepTimes(data=0.0, forward=1.0, wait=4.0)
    last = StepTimes(data=1.0, forward=4.0, wait=0.0)
    # It loads 0.5 and computes 1.5 more than the mean; the mean rank idles for 2 s, a quarter of it for data.
    assert shares_of(window_of([[first], [last]])) == pytest.approx((0.5 + 0.5, 0.0, 1.5, 2.5, 0.0, 0.0))


def test_waiting_for_a_rank_that_is_busy_between_steps_is_not_the_works() -> None:
    logs, waits = StepTimes(forward=1.0, other=5.0), StepTimes(forward=1.0, wait=4.0, other=1.0)
    shares, late = shares_of(times := window_of([[logs], [waits]])), who_is_late(times)
    assert shares == pytest.approx((0.0, 0.0, 0.0, 1.0, 0.0, 2.0)) and shares.bottleneck == "between"
    assert "rank 0 is the last in 100% of the steps" in figure_of("between", shares, late)
    advice = advice_on_bottleneck("between", late, on_gpu=True)
    assert "rank 0 does between steps" in advice and "balance" not in advice


def test_accumulated_micro_batches_are_judged_by_step() -> None:
    """Each rank is slow once: under DDP nobody waits long, although every micro-batch is unbalanced."""
    short, long, synced = (
        StepTimes(forward=1.0),
        StepTimes(forward=3.0),
        StepTimes(forward=1.0, wait=0.2),
    )
    shares = shares_of(window_of([[short, long._replace(wait=0.2)], [long, synced]], micro_batches=[2]))
    assert shares == pytest.approx((0.0, 0.2, 0.0, 4.0, 0.0, 0.0))
    assert shares.bottleneck == "kernels"


def test_where_ranks_wait_in_every_micro_batch_each_is_judged() -> None:
    """As above, under FSDP2."""
    first, second = StepTimes(forward=1.0, wait=2.0), StepTimes(forward=3.0)
    shares = shares_of(window_of([[first, second], [second, first]], micro_batches=[2], in_slots=True))
    assert shares == pytest.approx((0.0, 0.0, 2.0, 4.0, 0.0, 0.0))


def test_waiting_that_nothing_explains_is_not_shared_out_by_chance() -> None:
    last = StepTimes(data=0.01, forward=1.0, optimizer=2.0)
    shares = shares_of(window_of([[last], [StepTimes(forward=1.0, wait=2.0)]]))
    assert shares == pytest.approx((0.005 + 0.005, 0.0, 0.995, 1.0, 1.0, 0.0))


def test_two_steps_are_averaged_and_the_late_rank_is_the_usual_one() -> None:
    quick, slow = StepTimes(forward=1.0, wait=1.0), StepTimes(forward=2.0)
    times = window_of([[quick, quick, slow], [slow, slow, quick]])
    assert shares_of(times) == pytest.approx((0.0, 0.0, 0.5, 1.5, 0.0, 0.0))
    rank, steps, slowdown = who_is_late(times)
    assert rank == 1
    assert steps == pytest.approx(2 / 3)
    assert slowdown == pytest.approx(5.0 / 4.0)


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        (StepShares(data=0.12, exchange=0.1, straggler=0.1, kernels=0.6, optimizer=0.08, between=0.0), "data"),
        (StepShares(data=0.0, exchange=0.3, straggler=0.2, kernels=0.5, optimizer=0.0, between=0.0), "exchange"),
        (StepShares(data=0.09, exchange=0.09, straggler=0.09, kernels=0.64, optimizer=0.09, between=0.0), "kernels"),
        (StepShares(data=0.0, exchange=0.0, straggler=0.0, kernels=0.5, optimizer=0.5, between=0.0), "optimizer"),
        (StepShares(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), "kernels"),
    ],
)
def test_the_largest_loss_of_a_tenth_or_more_is_named(shares: StepShares, name: str) -> None:
    assert shares.bottleneck == name
    straggler = Straggler(rank=3, steps=0.5, slowdown=1.2)
    assert f"({getattr(shares, name):.3g} s of {shares.total:.3g} s)" in figure_of(shares.bottleneck, shares, straggler)


def test_one_slow_rank_and_changing_ones_call_for_different_remedies() -> None:
    slow = Straggler(3, steps=0.95, slowdown=1.2)
    assert "rank 3's GPU" in advice_on_bottleneck("straggler", slow, on_gpu=True)
    assert "nvidia-smi" in advice_on_bottleneck("straggler", slow, on_gpu=True)
    on_cpu = advice_on_bottleneck("straggler", slow, on_gpu=False)
    assert "rank 3" in on_cpu and "nvidia" not in on_cpu and "GPU" not in on_cpu
    for changing in (Straggler(3, steps=0.4, slowdown=1.2), Straggler(3, steps=0.95, slowdown=1.01)):
        assert "balance='planned'" in advice_on_bottleneck("straggler", changing, on_gpu=True)
    exchange = advice_on_bottleneck("exchange", Straggler(0, steps=0.4, slowdown=1.0), on_gpu=True)
    assert "symmetric" not in exchange, "it is slower than NCCL"
