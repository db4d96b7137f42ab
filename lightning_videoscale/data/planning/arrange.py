"""In which step and on which data-parallel rank each micro-batch is trained.

The ranks of a step wait for the slowest at the end of it (DDP), or at every micro-batch (FSDP2, ZeRO-3). Both are
served by one arrangement. A *row* is what the R ranks train at the same time: R micro-batches of nearly equal cost. A
step is K rows. Within each row the micro-batches are dealt such that the ranks' sums over the step come out equal: the
costliest to the rank that has least so far (LPT), rows that differ most first.

Micro-batches of nearly equal cost are found without leaving the order of the stream far behind: all are sorted by cost
and cut into *bands*; each band, back in the order of the stream, is cut into rows, and rows follow each other by their
place in the stream. A wide band mixes more shapes in a row, a narrow one balances better: bands are as narrow as a
diversity of the steps allows. Which of the two goes first where both cannot be had is the caller's choice: a diversity
that is asked for makes bands as wide as it takes, else they stay bearable. What is in a band with few others waits
longer for company.

A row of images has many samples, one of long clips few. Which rows make a step costs nothing, so they are exchanged
between a few steps in a row until all of these hold as many. Else a sample would count for more in a step of few; and
where it does not, gradients of steps would differ in size.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.diversity import ENOUGH, diversity
from lightning_videoscale.data.planning.seeded_random import SeededRandom

# Costs of a band differ by these factors at least and, where balance goes first, at most, e to the power of them.
_NARROWEST, _BEARABLE = 0.005, 0.25
_PRECISION = 0.004  # to which the width is found
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

    def with_bands(width: float) -> NDArray[np.int64]:
        band = _bands(cost[by_cost], dp_size, micro_batches, max_wait, width)
        rows = by_cost[np.lexsort((position[by_cost], band))].reshape(-1, dp_size)
        in_time = rows[np.argsort(position[rows].mean(axis=1), kind="stable")]
        return in_time[_evened(np.arange(len(rows)).reshape(-1, micro_batches), amount[in_time].sum(axis=1), few)]

    wanted, widest = (ENOUGH, _BEARABLE) if min_diversity is None else (min_diversity, _all_of(cost))
    too_narrow, wide_enough = _NARROWEST, widest
    while wide_enough - too_narrow > _PRECISION:
        width = (too_narrow + wide_enough) / 2
        if diversity(shape_id[with_bands(width)].reshape(-1, micro_batches * dp_size)) < wanted:
            too_narrow = width
        else:
            wide_enough = width
    steps = _deal(with_bands(wide_enough), cost)
    ranks = np.argsort(draws.uniform(len(steps) * dp_size).reshape(-1, dp_size), axis=1, kind="stable")
    steps = np.take_along_axis(steps, ranks[:, None, :], axis=2).transpose(0, 2, 1)
    if micro_batches == 1:
        return steps
    # Of steps that have exchanged rows, the first have the largest; so their order is drawn.
    return steps[np.lexsort((draws.uniform(len(steps)), np.arange(len(steps)) // few))]


def _all_of(cost: NDArray[np.float64]) -> float:
    """Width of a band that holds all costs."""
    return float(np.log(cost.max() / cost.min())) + _NARROWEST


def _bands(
    cost: NDArray[np.float64], dp_size: int, micro_batches: int, max_wait: float, width: float
) -> NDArray[np.int64]:
    """Number of the band of each micro-batch, by falling cost; every band is a whole number of rows."""
    total = len(cost)
    logarithm = -np.log(cost)
    least = total / (micro_batches * max_wait)
    edges = [0]
    while (start := edges[-1]) < total:
        wide = int(np.searchsorted(logarithm, logarithm[start] + width, side="right")) - start
        rows = math.ceil(max(wide, least) / dp_size)
        end = start + rows * dp_size
        edges.append(total if total - end < least / 2 else end)
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


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
