"""The stream of an epoch where it is too long for memory: any of its draws, as `epoch_stream` has them.

A pass over a dataset is one group of shards after the other, and within a group samples go by a random number of their
own. Generators can pass over numbers. So the draws of a few groups cost the numbers of these groups, and of the rest
only how many samples each shard has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.seeded_random import SeededRandom, runs
from lightning_videoscale.data.planning.stream import MIX, ORDER, draws_before, draws_of_epoch


@dataclass(frozen=True)
class LazyStream:
    """What `epoch_stream` returns for a table that is not in memory.

    Args:
        samples: (shards,) how many samples of each shard are drawn.
        source: (shards,) the dataset of each shard.
        samples_of: Returns the rows of the table that are drawn of some ascending shards, ascending.
        seed: Seed of all orders.
        shard_window: Shards that samples are shuffled over at a time.
        weights: Weight per dataset; None takes every sample of the one dataset once.

    Raises:
        ValueError: As `draws_before`, when draws are asked for.
    """

    samples: NDArray[np.int64]
    source: NDArray[np.int32]
    samples_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    seed: int
    shard_window: int
    weights: Sequence[float] | None = None

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """(datasets,) samples of each dataset."""
        datasets = 1 if self.weights is None else len(self.weights)
        return np.bincount(self.source, self.samples, minlength=datasets).astype(np.int64)

    @property
    def draws(self) -> int:
        """Draws of an epoch."""
        return int(draws_before(self.sizes, self.weights, 1).sum())

    def rows(self, epoch: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the table that some ascending draws of an epoch are, (n,)."""
        found = np.empty(len(draws), np.int64)
        firsts, counts = draws_of_epoch(self.sizes, self.weights, epoch)
        source, number = self._of_datasets(epoch, draws, counts)
        for dataset, (first, size) in enumerate(zip(firsts.tolist(), self.sizes.tolist(), strict=True)):
            own = np.flatnonzero(source == dataset)
            passes, places = np.divmod(first + number[own], max(size, 1))
            for each in np.unique(passes).tolist():
                found[own[passes == each]] = self._of_pass(dataset, each, places[passes == each])
        return found

    def _of_datasets(
        self, epoch: int, draws: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of which dataset each draw is, and which of its ``counts`` draws in this epoch."""
        if len(counts) == 1:
            return np.zeros_like(draws), draws
        pieces = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for run in runs(draws):
            source, number = self._mixed(epoch, int(run[0]), int(run[-1]) + 1, counts)
            pieces.append((source[run - run[0]], number[run - run[0]]))
        of_all, numbers = zip(*pieces, strict=True)
        return np.concatenate(of_all), np.concatenate(numbers)

    def _mixed(
        self, epoch: int, first: int, last: int, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same for the draws ``first`` to ``last``.

        Draw i of n of a dataset lies between i / n and (i + 1) / n of the epoch. So before a place x of it there are x
        times all draws, but for one of each dataset, and few draws beside the asked ones decide their order.
        """
        datasets, total = len(counts), int(counts.sum())
        begin, end = (first - datasets - 1) / total, (last + datasets + 1) / total
        sources, numbers, places, skipped = [], [], [], 0
        for source, count in enumerate(counts.tolist()):
            begins = min(max(0, int(begin * count)), count)
            number = np.arange(begins, min(count, int(end * count) + 1))
            skipped += begins
            offset = SeededRandom(self.seed, source, epoch, MIX).uniform_at(number, count)
            sources.append(np.full(len(number), source))
            numbers.append(number)
            places.append((number + offset) / max(count, 1))
        order = np.argsort(np.concatenate(places), kind="stable")[first - skipped : last - skipped]
        return np.concatenate(sources)[order], np.concatenate(numbers)[order]

    def _of_pass(self, dataset: int, number: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at ascending places of one pass over a dataset."""
        shards = np.flatnonzero((self.source == dataset) & (self.samples > 0))
        samples = self.samples[shards]
        order = SeededRandom(self.seed, dataset, number, ORDER).permutation(len(shards))
        groups = np.arange(0, len(shards), self.shard_window)
        ends = np.cumsum(np.add.reduceat(samples[order], groups))
        group_of = np.searchsorted(ends, places, side="right")
        before = np.cumsum(samples) - samples  # samples of the dataset in earlier shards
        found = np.empty(len(places), np.int64)
        for group in np.unique(group_of).tolist():
            own = np.sort(order[groups[group] : groups[group] + self.shard_window])
            numbers = spans(before[own], samples[own])
            draws = SeededRandom(self.seed, dataset, number, ORDER)
            shuffle = draws.raw_at(len(shards) + numbers, len(shards) + int(samples.sum()))
            rows = self.samples_of(shards[own])[np.argsort(shuffle, kind="stable")]
            here = slice(*np.searchsorted(group_of, [group, group + 1]).tolist())
            found[here] = rows[places[here] - (ends[group] - len(rows))]
        return found


def spans(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``counts`` integers from each of ``firsts`` on, one span behind the other."""
    begins = np.cumsum(counts) - counts
    found: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts)
    return found
