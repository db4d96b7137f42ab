"""The clock on GPUs: CUDA events tell a slow rank from one that waits, and nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.timing import CudaMarks, StepClock, StepTimes, add_up
from tests.callbacks.toy import trainer_with
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import needs_deepspeed
from tests.timing.slow_training import Pace, Paced, ReadingTheClock, Rows, train

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], ProcessPool]

# Long beside what the host does for a step, on a machine with other work too.
FAST, SLOW = Pace(forward=0.04, backward=0.04), Pace(forward=0.20, backward=0.12)
STRATEGIES = [
    "plain_ddp",
    "ddp",
    "fsdp2",
    *(pytest.param(name, marks=needs_deepspeed) for name in ("zero1", "zero2", "zero3")),
]


def typical(times: list[StepTimes]) -> StepTimes:
    """Medians of all but the first, which sets things up."""
    return StepTimes(*(median(column) for column in zip(*times[1:], strict=True)))


def test_the_clock_times_the_device_without_stopping_it() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    clock = StepClock(CudaMarks(torch.device("cuda")))
    begin = time.perf_counter()
    for products in (10, 100):
        clock.enter("forward")
        for _ in range(products):
            a @ a
        clock.end_micro_batch()
    enqueued = time.perf_counter() - begin
    short, long = clock.read()
    figures = f"{short=}\n{long=}\n{enqueued=}"
    assert 5 < long.forward / short.forward < 20, figures
    assert enqueued < long.forward, figures  # the host was done before the device


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slow_rank_computes_and_the_other_waits(gpu_ranks: Ranks, strategy: str) -> None:
    fast, slow = (typical(times) for times in gpu_ranks(2).run(train, strategy, [FAST, SLOW], micro_batches=8))
    figures = f"{fast=}\n{slow=}"
    assert slow.forward == pytest.approx(SLOW.forward, rel=0.2), figures
    assert slow.backward == pytest.approx(SLOW.backward, rel=0.25), figures
    assert fast.forward == pytest.approx(FAST.forward, abs=0.03), figures
    assert fast.backward == pytest.approx(FAST.backward, abs=0.03), figures
    # What the slow rank waits is the exchange itself, which is part of both ranks' waits.
    assert fast.wait - slow.wait == pytest.approx(slow.compute - fast.compute, rel=0.25), figures
    assert slow.wait < 0.04, figures
    assert fast.exchange == slow.exchange == 0.0, figures


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_accumulated_and_recomputed_micro_batches(gpu_ranks: Ranks, strategy: str) -> None:
    pace = Pace(forward=0.12, backward=0.08, validation=0.1)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    settings = {"activation_checkpointing": True}
    fast, slow = gpu_ranks(2).run(train, strategy, [Pace(), pace], micro_batches=10, settings=settings, **options)
    # Step by step, each with the validation before it; the first has none.
    fast_steps, slow_steps = ([add_up(times[n : n + 2]) for n in (2, 4, 6, 8)] for times in (fast, slow))
    waited, validated = median(step.wait for step in fast_steps), median(step.other for step in slow_steps)
    figures = f"{waited=}\n{validated=}\n{typical(fast)=}\n{typical(slow)=}\n{fast=}\n{slow=}"
    assert typical(slow).forward == pytest.approx(0.12, rel=0.2), figures
    assert typical(slow).backward == pytest.approx(0.20, rel=0.2), figures  # the forward pass is computed again
    assert typical(fast).compute < 0.06, figures
    validation = pace.forward + pace.validation  # validation runs the forward pass too
    assert validated == pytest.approx(validation, abs=0.05), figures  # with what the host does around it
    # All that the slow rank does between two reductions, 860 ms, but for the little that the fast one does meanwhile.
    assert waited == pytest.approx(2 * (0.12 + 0.20) + validation, rel=0.1), figures


def test_what_the_device_does_not_notice_of_the_loader_is_no_waiting() -> None:
    """The host waits 30 ms for each batch while the device has 120 ms of work before it; then the other way round."""
    pace = Pace(data=0.03, forward=0.12)
    hidden, seen = ReadingTheClock(), ReadingTheClock()
    trainer_with(hidden, accelerator="gpu").fit(Paced(pace), DataLoader(Rows(pace, 8)))
    assert max(times.data for times in hidden.times[2:]) < 0.01, hidden.times
    pace = Pace(data=0.12, forward=0.03)
    trainer_with(seen, accelerator="gpu").fit(Paced(pace), DataLoader(Rows(pace, 8)))
    assert typical(seen.times).data == pytest.approx(0.09, abs=0.03), seen.times


def exchanging() -> list[StepTimes]:
    reading = ReadingTheClock()
    trainer = pl.Trainer(
        strategy=SequenceParallelDDPStrategy(ulysses_size=2),
        accelerator="gpu",
        devices=2,
        max_steps=4,
        callbacks=[reading],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RectifiedFlow(), DataLoader(Clips((4, 16, 16), torch.float32)))
    return reading.times


def test_exchanges_of_a_group_are_told_apart(gpu_ranks: Ranks) -> None:
    for times in gpu_ranks(2).run(exchanging):
        assert len(times) == 4, times
        assert all(0.0 < time.exchange < time.total for time in times), times
        assert all(time.compute > 0.0 for time in times), times
