"""Loaders of users' own that end at different places, or never: the ranks end together, or are told why not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tests.distributed.loading.test_read_once import Numbers
from tests.distributed.loading.users import SAMPLES, STRATEGIES, Strided, fit
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class Repeating(Sampler[int]):
    """Draws as it goes, from the default generator, and for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(SAMPLES)


def endless(batch_size: int, strategy: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(SAMPLES), batch_size, sampler=Repeating())


def test_a_sampler_that_draws_as_it_goes_agrees(ranks: Ranks) -> None:
    first, second = ranks(2).run(fit, "ddp", 2, endless, 2, max_steps=6, use_distributed_sampler=False)
    assert first == second and len(first[0]) == 6


def uneven(ends: tuple[int, int], strategy: Any) -> DataLoader[Tensor]:
    return DataLoader(Strided(strategy.data_parallel_rank, strategy.data_parallel_size, ends), 2)


class Sized:
    """Batches whose number is known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(self.length))


def uneven_sized(lengths: tuple[int, int], strategy: Any) -> Sized:
    return Sized(lengths[strategy.data_parallel_rank])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_streams_of_different_lengths_end_together(ranks: Ranks, strategy: str) -> None:
    results = ranks(4).run(fit, strategy, 2, uneven, (16, 24), max_epochs=2)
    first, second = [[0, 2], [4, 6], [8, 10], [12, 14]], [[1, 3], [5, 7], [9, 11], [13, 15]]
    assert results == [[first] * 2] * 2 + [[second] * 2] * 2


def test_data_whose_lengths_are_known_to_differ_are_refused(ranks: Ranks) -> None:
    pool = ranks(4)
    try:
        messages = pool.run(fit, "ddp", 2, uneven_sized, (6, 4))
    finally:
        pool.stop()  # an error in the middle of a fit leaves the processes out of step
    for message in messages:
        assert "ranks [1] ended after 4 micro-batches" in message and "[0] have more" in message


def test_a_limit_makes_them_equal(ranks: Ranks) -> None:
    results = ranks(4).run(fit, "ddp", 2, uneven_sized, (6, 4), limit_train_batches=3)
    assert [len(epochs[1]) for epochs in results] == [3] * 4
