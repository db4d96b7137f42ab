"""How a benchmark takes its times: alternating rounds, medians, the slowest rank."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

Run = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one variant, each the largest of the ranks' medians.

    Attributes:
        rounds: Per round, the median of its repeats.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)

    def over(self, other: Times) -> float:
        """Median of the ratios round by round, in which what changes slowly (clocks, heat) cancels."""
        return statistics.median(self._ratios(other))

    def spread_over(self, other: Times) -> dict[str, float]:
        """Median and spread of these ratios: how many times as long it takes as the other."""
        ratios = self._ratios(other)
        return {name: round(of(ratios), 4) for name, of in (("median", statistics.median), ("min", min), ("max", max))}

    def _ratios(self, other: Times) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True)]


def alternate(
    variants: Mapping[str, Run],
    *,
    device: torch.device,
    warm_up: int,
    repeats: int,
    rounds: int,
    around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> dict[str, Times]:
    """Times variants that take turns, in another order in every round; collective over all ranks.

    The order is drawn: behind one and the same variant, another one would always find the device as that has left it.

    Args:
        variants: What to run, by name.
        device: Whose time counts.
        warm_up: Runs of each before the first round.
        repeats: Timed runs of each in a round, after one that is not.
        rounds: How often each has its turn.
        around: Given a name, a context for each of its turns.
    """
    for run in variants.values():
        for _ in range(warm_up):
            run()
    medians: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)  # alike on all ranks
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            with around(name):
                variants[name]()  # caches and allocator as this variant leaves them
                medians[name].append(statistics.median(_repeat(variants[name], repeats, device)))
    return {name: Times(tuple(_slowest(mine, device))) for name, mine in medians.items()}


def _repeat(run: Run, repeats: int, device: torch.device) -> list[float]:
    if device.type == "cpu":
        return [_on_the_host(run) for _ in range(repeats)]
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _on_the_host(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def _slowest(values: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized():
        return values
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    slowest: list[float] = x.tolist()
    return slowest
