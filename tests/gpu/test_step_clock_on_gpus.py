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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Ranks = Callable[[int], ProcessPool]

FAST, SLOW = Pace(forward=0.02, backward=0.02), Pace(forward=0.10, backward=0.06)
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
    watch = clock.watch()
    begin = time.perf_counter()
    for products in (10, 100):
        clock.enter("forward")
        for _ in range(products):
            a @ a
        clock.end_micro_batch()
    enqueued = time.perf_counter() - begin
    short, long = watch.read()
    assert 5 < long.forward / short.forward < 20
    assert enqueued < long.forward  # the host was done before the device


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slow_rank_computes_and_the_other_waits(gpu_ranks: Ranks, strategy: str) -> None:
    fast, slow = (typical(times) for times in gpu_ranks(2).run(train, strategy, [FAST, SLOW], micro_batches=8))
    assert slow.forward == pytest.approx(0.10, abs=0.02) and slow.backward == pytest.approx(0.06, abs=0.02)
    assert fast.forward == pytest.approx(0.02, abs=0.015) and fast.backward == pytest.approx(0.02, abs=0.015)
    assert fast.wait == pytest.approx(0.12, abs=0.03)
    assert slow.wait < 0.02
    assert fast.exchange == slow.exchange == 0.0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_accumulated_and_recomputed_micro_batches(gpu_ranks: Ranks, strategy: str) -> None:
    pace = Pace(forward=0.06, backward=0.04, validation=0.05)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    settings = {"activation_checkpointing": True}
    fast, slow = gpu_ranks(2).run(train, strategy, [Pace(), pace], micro_batches=8, settings=settings, **options)
    assert typical(slow).forward == pytest.approx(0.06, abs=0.02)
    assert typical(slow).backward == pytest.approx(0.10, abs=0.02)  # the forward pass is computed again
    assert typical(fast).compute < 0.04
    steps = [add_up(fast[n : n + 2]) for n in (2, 4, 6)]
    # Two micro-batches of 160 ms, and the validation, for which the other rank is waited as well.
    assert 0.28 < median(step.wait for step in steps) < 0.42


def test_what_the_device_does_not_notice_of_the_loader_is_no_waiting() -> None:
    """The host waits 20 ms for each batch while the device has 60 ms of work before it."""
    pace = Pace(data=0.02, forward=0.06)
    hidden, seen = ReadingTheClock(), ReadingTheClock()
    trainer_with(hidden, accelerator="gpu").fit(Paced(pace), DataLoader(Rows(pace, 8)))
    assert max(times.data for times in hidden.times[2:]) < 0.01
    pace = Pace(data=0.06, forward=0.02)
    trainer_with(seen, accelerator="gpu").fit(Paced(pace), DataLoader(Rows(pace, 8)))
    assert typical(seen.times).data == pytest.approx(0.04, abs=0.015)


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
        assert len(times) == 4
        assert all(0.0 < time.exchange < time.total for time in times)
        assert all(time.compute > 0.0 for time in times)
