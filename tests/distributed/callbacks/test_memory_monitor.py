"""MemoryMonitor over two gloo processes: the largest of both, and a rank that cannot read keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.callbacks.test_memory_monitor import Scripted
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with
from tests.distributed.pool import ProcessPool

GIB = 2**30


def _run() -> tuple[list[float], dict[int, float]]:
    rank = torch.distributed.get_rank()
    peaks = [150, 200, 350] if rank == 0 else [RuntimeError("lost"), 300, 340]
    monitor, logger = Scripted(peaks, every_n_steps=1), MemoryLogger()
    trainer = trainer_with(monitor, logger=logger, strategy="ddp", devices=2, use_distributed_sampler=False)
    trainer.fit(Slope(), batches_of([Meta(1, 50 + rank)] * 3))
    return [row["memory/peak_gib"] for _, row in logger.rows if "memory/peak_gib" in row], monitor.peaks


def test_the_largest_of_all_ranks(ranks: Callable[[int], ProcessPool]) -> None:
    for logged, peaks in ranks(2).run(_run):
        assert logged == [150, 300, 350]
        assert peaks == {50: 350 * GIB, 51: 340 * GIB}
