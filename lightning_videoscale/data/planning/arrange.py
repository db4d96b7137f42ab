"""In which step and on which data-parallel rank each micro-batch is trained.

The ranks of a step wait for the slowest at the end of it (DDP), or at every micro-batch (FSDP2, ZeRO-3). Both are
served by one arrangement. A *row* is what the R ranks train at the same time: R micro-batches of nearly equal cost. A
step is K rows. Within each row the micro-batches are dealt such that the ranks' sums over the step come out equal: the
costliest to the rank that has least so far (LPT), rows that differ most first.

Micro-batches of nearly equal cost are found without leaving the order of the stream far behind: all are sorted by cost
and cut into *bands*, see `bands`; each band, back in the order of the stream, is cut into rows, and rows follow each
other by their place in the stream. A wide band mixes more shapes in a row, a narrow one balances better: bands are as
narrow as a diversity of the steps allows. Which of the two goes first where both cannot be had is the caller's choice:
a diversity that is asked for makes bands as wide as it takes, else ranks wait for a bearable share of the time. What is
in a band with few others waits longer for company.

A row of images has many samples, one of long clips few. Which rows make a step costs nothing, so they are exchanged
between a few steps in a row until all of these hold as many. Else a sample would count for more in a step of few; and
where it does not, gradients of steps would differ in size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.bands import BandCuts
from lightning_videoscale.data.planning.diversity import ENOUGH, diversity
from lightning_videoscale.data.planning.seeded_random import SeededRandom

# Of bands: from next to nothing to one for all. These are exact, where ranks' processors may round powers otherwise.
_WIDTHS = [quarters * 2.0**power for power in range(-8, 4) for quarters in (1, 1.25, 1.5, 1.75)]
_BEARABLE = 0.08  # of the time, that ranks wait where balance goes first
_GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples, modulo 1, are evenly apart however many there are
_FEW = 16  # steps that exchange rows, at most


def in_stream_order(
    position: NDArray[np.float64], dp_size: int, micro_batches: int, draws: SeededRandom
) -> NDArray[np.int64]:
    """Each rank takes what comes next, whatever it costs: what loaders without a plan do.

    Args:
        position: (M,) place of every micro-batch in the stream; M is a multiple of ``dp_size * micro_batches``.
        dp_size: Data-parallel ranks R.
        micro_batches: Micro-batches K of a rank and step.
        draws: Who takes it is drawn.

    Returns:
        (steps, R, K) numbers of micro-batches.
    """
    drawn = draws.permutation(len(position))
    order = drawn[np.argsort(position[drawn], kind="stable")]
    steps = order.reshape(-1, dp_size * micro_batches)
    places = np.argsort(draws.uniform(len(position)).reshape(steps.shape), axis=1, kind="stable")
    return np.take_along_axis(steps, places, axis=1).reshape(-1, dp_size, micro_batches)


def balanced(
    cost: NDArray[np.float64],
    position: NDArray[np.float64],
    shape_id: NDArray[np.int64],
    amount: NDArray[np.float64],
    dp_size: int,
    micro_batches: int,
    max_wait: float,
    min_diversity: float | None,
    draws: SeededRandom,
) -> NDArray[np.int64]:
    """Equal cost on every rank, in every step and in every row of it.

    Args:
        cost: (M,) predicted cost of every micro-batch, above zero.
        position: (M,) place in the stream; M is a multiple of ``dp_size * micro_batches``.
        shape_id: (M,) shapes.
        amount: (M,) what each counts in the gradient.
        dp_size: Data-parallel ranks R.
        micro_batches: Micro-batches K of a rank and step.
        max_wait: Every band makes a row at least this often, in steps.
        min_diversity: Different shapes in a step over how many random draws would have, however unequal the costs
            become. None: `ENOUGH`, where a bearable spread of costs allows as many.
        draws: Which rank gets which of the equal shares is drawn: ties would always favour the same.

    Returns:
        (steps, R, K) numbers of micro-batches.
    """
    # Of equal costs, any number of the first are evenly apart in the stream: a band that ends among them takes some.
    by_cost = np.lexsort((np.arange(len(cost)) * _GOLDEN % 1, -cost))
    # So few that no sample waits much longer. Where all count alike, an exchange would gain nothing.
    few = max(1, int(min(_FEW, max_wait / 4))) if np.ptp(amount) else 1

    bands = BandCuts(cost[by_cost], dp_size, len(cost) / (micro_batches * max_wait))

    def with_bands(cuts: NDArray[np.int64]) -> NDArray[np.int64]:
        band = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts) * dp_size)
        rows = by_cost[np.lexsort((position[by_cost], band))].reshape(-1, dp_size)
        in_time = rows[np.argsort(position[rows].mean(axis=1), kind="stable")]
        return in_time[_evened(np.arange(len(rows)).reshape(-1, micro_batches), amount[in_time].sum(axis=1), few)]

    def is_diverse(cuts: NDArray[np.int64]) -> bool:
        return diversity(shape_id[with_bands(cuts)].reshape(-1, micro_batches * dp_size)) >= wanted

    wanted, bearable = (ENOUGH, _BEARABLE) if min_diversity is None else (min_diversity, math.inf)
    steps = _deal(with_bands(_narrowest(bands, is_diverse, bearable)), cost)
    ranks = np.argsort(draws.uniform(len(steps) * dp_size).reshape(-1, dp_size), axis=1, kind="stable")
    steps = np.take_along_axis(steps, ranks[:, None, :], axis=2).transpose(0, 2, 1)
    if micro_batches == 1:
        return steps
    # Of steps that have exchanged rows, the first have the largest; so their order is drawn.
    return steps[np.lexsort((draws.uniform(len(steps)), np.arange(len(steps)) // few))]


def _narrowest(bands: BandCuts, is_diverse: Callable[[NDArray[np.int64]], bool], bearable: float) -> NDArray[np.int64]:
    """The narrowest cuts that are diverse; where these wait for longer than is bearable, the widest that do not."""

    def is_wide(width: float) -> bool:
        cuts = bands.best(width)
        return bands.waits(cuts) > bearable or is_diverse(cuts)

    found = bisect_left(_WIDTHS, True, hi=len(_WIDTHS) - 1, key=is_wide)
    wide, narrow = (bands.best(_WIDTHS[number]) for number in (found, max(0, found - 1)))
    tried = bands.between(wide, narrow)
    first = bisect_left(tried, True, hi=len(tried) - 1, key=lambda cuts: bands.waits(cuts) <= bearable)
    last = bisect_left(tried, True, key=lambda cuts: not is_diverse(cuts)) - 1
    return tried[max(first, last)]


def _evened(steps: NDArray[np.int64], amount: NDArray[np.float64], few: int) -> NDArray[np.int64]:
    """Exchanges rows between so few steps in a row, (steps, K), such that all of them hold as much."""
    if steps.shape[1] == 1:
        return steps
    rows, few = steps.shape[1], min(few, len(steps))
    whole = len(steps) // few * few
    together = steps[:whole].reshape(-1, few * rows)
    falling = np.take_along_axis(together, np.argsort(-amount[together], axis=1, kind="stable"), axis=1)
    dealt = _deal(falling.reshape(-1, rows, few), amount).transpose(0, 2, 1).reshape(-1, rows)
    return dealt if whole == len(steps) else np.concatenate([dealt, _evened(steps[whole:], amount, few)])


def _deal(steps: NDArray[np.int64], cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Orders each row of each step, (steps, K, R), such that the sums over K are nearly equal."""
    spread = np.ptp(cost[steps], axis=2)
    steps = np.take_along_axis(steps, np.argsort(-spread, axis=1, kind="stable")[:, :, None], axis=1)
    load = np.zeros((len(steps), steps.shape[2]))
    for k in range(steps.shape[1]):
        row = steps[:, k]
        costliest = np.take_along_axis(row, np.argsort(-cost[row], axis=1, kind="stable"), axis=1)
        poorest = np.argsort(load, axis=1, kind="stable")
        np.put_along_axis(steps[:, k], poorest, costliest, axis=1)
        load += cost[steps[:, k]]
    return steps
