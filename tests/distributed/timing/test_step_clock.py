"""The clock on two gloo processes: whose work it was, and who waited, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from lightning_videoscale.timing import StepTimes, add_up
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed
from tests.timing.slow_training import Pace, train

Ranks = Callable[[int], ProcessPool]

pytestmark = pytest.mark.timed

FAST, SLOW = Pace(forward=0.06, backward=0.06), Pace(forward=0.30, backward=0.18)
STRATEGIES = [
    "plain_ddp",
    "ddp",
    "fsdp2",
    *(pytest.param(stage, marks=[needs_deepspeed, pytest.mark.full]) for stage in ("zero1", "zero2")),
    pytest.param("zero3", marks=needs_deepspeed),
]


def least(times: list[StepTimes]) -> StepTimes:
    """The shortest of every phase: what a busy machine does besides makes some of them longer."""
    return StepTimes(*map(min, zip(*times, strict=True)))


def waits(times: list[StepTimes]) -> float:
    return median(time.wait for time in times)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slow_rank_computes_and_the_other_waits(ranks: Ranks, strategy: str) -> None:
    fast, slow = ranks(2).run(train, strategy, [FAST, SLOW], micro_batches=4)
    assert 0.30 <= least(slow).forward < 0.36 and 0.18 <= least(slow).backward < 0.24
    assert 0.06 <= least(fast).forward < 0.10 and 0.06 <= least(fast).backward < 0.10
    assert waits(fast) > 0.24  # 480 ms of the slow rank against 120 ms
    assert waits(slow) < waits(fast) / 2
    assert all(time.exchange == 0.0 for time in fast + slow)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.full), "fsdp2"])
def test_accumulated_and_recomputed_micro_batches_with_validation_in_between(ranks: Ranks, strategy: str) -> None:
    pace = Pace(forward=0.18, backward=0.12, validation=0.15)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    settings = {"activation_checkpointing": True}
    fast, slow = ranks(2).run(train, strategy, [Pace(), pace], micro_batches=6, settings=settings, **options)
    assert len(fast) == len(slow) == 6
    assert 0.30 <= least(slow).backward < 0.36  # the forward pass is computed again
    assert least(fast).compute < 0.05
    steps = [add_up(fast[n : n + 2]) for n in (0, 2, 4)]
    assert waits(steps) > 0.6  # of 960 ms that the other computes
    if strategy == "ddp":  # nothing is reduced in the first micro-batch of a step
        assert least(slow[::2]).wait < 0.02
    assert least(slow[2::2]).other >= 0.15  # validation


def test_waiting_for_data_is_not_waiting_for_ranks(ranks: Ranks) -> None:
    late, early = ranks(2).run(train, "ddp", [Pace(data=0.3), Pace()], micro_batches=4)
    assert least(late).data >= 0.3 > 0.05 > least(early).data
    assert waits(early) > 0.15 > 0.05 > least(late).wait
    assert max(least(late).compute, least(early).compute) < 0.05
