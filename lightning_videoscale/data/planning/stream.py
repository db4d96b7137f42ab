"""In which order an epoch draws the samples.

Samples are shuffled within windows of shards, and shards from epoch to epoch: what is read at one time lies in few
shards, so reading from remote storage stays sequential. Datasets are mixed by weight: each is walked through at its own
pace, once through all of its samples before any comes again, over the borders of epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.data.planning.seeded_random import SeededRandom
from lightning_videoscale.data.planning.table import SampleTable

ORDER, MIX = 2, 3
"""What names the random numbers of a pass over a dataset, and of how datasets mix."""


def dataset_sizes(table: SampleTable, datasets: int) -> NDArray[np.int64]:
    """(datasets,) how many samples of each can be trained on."""
    return np.bincount(table.source[table.shape_id >= 0], minlength=datasets)


def draws_before(sizes: NDArray[np.int64], weights: Sequence[float] | None, epoch: int) -> NDArray[np.int64]:
    """How many samples of each dataset the epochs before one draw, (datasets,): all of them, or by weight as many.

    What is no whole number of an epoch adds up over epochs. Draw k of a dataset comes at (k + 1/2) / its share, and an
    epoch takes those that come next, as many as there are samples.

    Args:
        sizes: Samples of each dataset.
        weights: Weight per dataset; None takes every sample once.
        epoch: Number of the epoch, from 0.

    Raises:
        ValueError: If there is not one positive, finite weight per dataset, or nothing to draw of one.
    """
    if weights is None:
        return sizes * epoch
    if (empty := np.flatnonzero(sizes == 0)).size:
        raise ValueError(
            f"Nothing can be drawn of datasets {(empty + 1).tolist()} of {len(sizes)}: none of their samples can be "
            "trained on. `videoscale index` says why; leave them out."
        )
    if len(weights) != len(sizes) or not (min(weights) > 0 and math.isfinite(sum(weights))):
        raise ValueError(f"{len(sizes)} datasets need one positive, finite weight each, got {list(weights)}.")
    shares, total = np.array(weights) / np.sum(weights), int(sizes.sum()) * epoch
    # Rounding adds half a draw to each at most: these are never too many.
    drawn: NDArray[np.int64] = np.floor(shares * max(0, total - len(sizes) / 2) + 0.5).astype(np.int64)
    for _ in range(total - int(drawn.sum())):
        drawn[np.argmin((drawn + 0.5) / shares)] += 1
    return drawn


def draws_of_epoch(
    sizes: NDArray[np.int64], weights: Sequence[float] | None, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(datasets,) the first draw of each dataset in an epoch, and how many there are; raises as `draws_before`."""
    first = draws_before(sizes, weights, epoch)
    return first, draws_before(sizes, weights, epoch + 1) - first


def epoch_stream(
    table: SampleTable, epoch: int, seed: int, shard_window: int, weights: Sequence[float] | None = None
) -> NDArray[np.int64]:
    """Rows of the table in the order in which an epoch draws them; a row may come twice only where weights ask for it.

    Args:
        table: The samples.
        epoch: Number of the epoch, from 0.
        seed: Seed of all orders.
        shard_window: Shards that samples are shuffled over at a time.
        weights: Weight per dataset; None takes every sample once.
    """
    firsts, counts = draws_of_epoch(dataset_sizes(table, 1 if weights is None else len(weights)), weights, epoch)
    parts, places = [], []
    for source, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True)):
        rows = np.flatnonzero((table.source == source) & (table.shape_id >= 0))
        parts.append(_walk(rows, table.shard[rows], (seed, source), first, count, shard_window))
        # Evenly spread, with a random offset of their own each.
        places.append((np.arange(count) + SeededRandom(seed, source, epoch, MIX).uniform(count)) / max(count, 1))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]


def _walk(
    rows: NDArray[np.int64],
    shard: NDArray[np.int32],
    key: tuple[int, int],
    first: int,
    count: int,
    shard_window: int,
) -> NDArray[np.int64]:
    """Draws ``first`` to ``first + count`` of one dataset's endless sequence of shuffled passes."""
    if not count:
        return rows[:0]
    passes = range(first // len(rows), (first + count - 1) // len(rows) + 1)
    orders = [rows[_shuffled(shard, SeededRandom(*key, number, ORDER), shard_window)] for number in passes]
    skipped = first - passes[0] * len(rows)
    return np.concatenate(orders)[skipped : skipped + count]


def _shuffled(shard: NDArray[np.int32], draws: SeededRandom, shard_window: int) -> NDArray[np.int64]:
    """One pass: shards in random order, samples shuffled within every ``shard_window`` of them."""
    shards, number = np.unique(shard, return_inverse=True)
    place = np.empty(len(shards), np.int64)
    place[draws.permutation(len(shards))] = np.arange(len(shards)) // shard_window
    shuffled = draws.permutation(len(shard))
    return shuffled[np.argsort(place[number[shuffled]], kind="stable")]
