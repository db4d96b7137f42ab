"""The plan of an epoch: who trains on what, when.

A plan is a pure function of the samples, the settings, the seed, the epoch and what of the epoch is already done. Every
rank computes all of it and takes its own part; no rank asks another. Words used here: a *step* is one optimizer step,
made of ``micro_batches`` micro-batches on each of ``dp_size`` data-parallel ranks; a *slot* is one place for a
micro-batch in a step; a *draw* is one place in the epoch's stream of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.data.planning.arrange import balanced, in_stream_order
from lightning_videoscale.data.planning.batches import Batches, affordable_wait, cut, whole_steps
from lightning_videoscale.data.planning.epoch_plan import EpochPlan
from lightning_videoscale.data.planning.layout import Arrangement
from lightning_videoscale.data.planning.seeded_random import SeededRandom
from lightning_videoscale.data.planning.stream import epoch_stream
from lightning_videoscale.data.planning.table import SampleTable
from lightning_videoscale.data.planning.windows import EpochWindows, Window

Balance = Literal["planned", "dual_constraint", "equal_token"]
LossUnit = Literal["sample", "token", "none"]
LossNormalization = Literal["step", "epoch"]

_ARRANGE = 4

_COUNTS = ("micro_batches", "dp_size", "shard_window")
_SHARES = ("min_diversity",)
_WORDS = {"balance": Balance, "loss_weighting": LossUnit, "loss_normalization": LossNormalization}


def check_settings(**settings: float | str | None) -> None:
    """Looks at settings of `BucketPlanner` by name, whichever are known already; None is not.

    Raises:
        ValueError: If a number is below 1 or a seed below 0, a count is not whole, a share is none, or a word is
            unknown.
    """
    for name in (*_COUNTS, "window"):
        count = settings.get(name)
        if count is not None and not (isinstance(count, int | float | np.integer) and count >= 1 and not count % 1):
            raise ValueError(f"{name}={count!r} must be a whole number of at least 1.")
    wait = settings.get("max_wait")
    if wait is not None and not (isinstance(wait, int | float | np.integer | np.floating) and wait >= 1):
        raise ValueError(f"max_wait={wait!r} must be a number of steps, at least 1; math.inf for no limit.")
    seed = settings.get("seed")
    if seed is not None and not (isinstance(seed, int | np.integer) and seed >= 0):
        raise ValueError(f"seed={seed!r} must be a whole number of at least 0.")
    for name in _SHARES:
        share = settings.get(name)
        if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ValueError(f"{name}={share!r} must be a number between 0 and 1, or None.")
    for name in _WORDS.keys() & settings.keys():
        if settings[name] not in get_args(_WORDS[name]):
            raise ValueError(f"{name}={settings[name]!r} must be one of {get_args(_WORDS[name])}.")


@dataclass(frozen=True)
class BucketPlanner:
    """Plans epochs: buckets by shape, micro-batches within the budget, every draw exactly once.

    Args:
        table: The samples.
        budget: Samples per micro-batch, by sequence length.
        balance: ``planned``: every rank's step costs the same; in an epoch of at most ``max_wait`` steps also never
            slower than ``dual_constraint`` by prediction, nor less even where it is no quicker. ``dual_constraint``:
            each rank draws alone, batches within memory and compute (AdaptiveLoad, equation 2). ``equal_token``: each
            rank draws alone, batches within memory.
        dp_size: Data-parallel ranks R.
        micro_batches: Micro-batches K per rank and step.
        step_time: Predicts what is balanced, in seconds. None balances the cost that the budget predicts.
        loss_weighting: ``sample``: every sample has the same weight in the gradient. ``token``: every token has.
            ``none``: every micro-batch has.
        loss_normalization: ``step``: the weights of a step's samples (or tokens) sum to one, so its gradient is that of
            one big batch. ``epoch``: those of the epoch do; a step's gradient is the sum over its samples by what a
            step has on average, and the mean over the steps is exactly the mean over all samples.
        seed: Seed of all draws.
        shuffle: Whether every epoch is another permutation; else samples stay in the order of the table.
        shard_window: Shards that samples are shuffled over at a time.
        source_weights: Weight per dataset; None draws every sample once per epoch.
        redraw: The table of an epoch, where every epoch draws shapes anew: the same samples in the same rows. None: it
            is ``table`` in every epoch.
        max_wait: Steps over which ``planned`` gathers the samples of a micro-batch, and micro-batches of like cost, at
            most, about. None: 120, or twice, four times as many and so on, until the samples that find no company in so
            few steps cost at most 0.5 % of the epoch and make at most 10 % more micro-batches: one rank has one
            micro-batch a step, whatever shapes there are.
        min_diversity: Different shapes in a step of ``planned`` over how many random draws would have, in [0, 1]. More
            of them in a step cost differently, so ranks are as equal as this allows. None: equal costs go first, and
            steps are as diverse as they allow, up to 0.8; on many ranks of one micro-batch that may be less.
        windows: Cuts epochs into windows, so that none is in memory as a whole, and shuffles and mixes as it says; the
            table is then a sample of what it holds. None: an epoch is planned as a whole.

    Raises:
        ValueError: If a number is below 1 or the seed below 0, a count is not whole, ``min_diversity`` is no share, or
            a word is unknown; if ``source_weights`` come with ``shuffle=False``.
    """

    table: SampleTable
    budget: Budget
    balance: Balance = "planned"
    dp_size: int = 1
    micro_batches: int = 1
    step_time: StepTimeModel | None = None
    loss_weighting: LossUnit = "sample"
    loss_normalization: LossNormalization = "step"
    seed: int = 0
    shuffle: bool = True
    shard_window: int = 64
    source_weights: Sequence[float] | None = None
    redraw: Callable[[int], SampleTable] | None = None
    max_wait: float | None = None
    min_diversity: float | None = None
    windows: EpochWindows | None = None

    def __post_init__(self) -> None:
        check_settings(**{name: getattr(self, name) for name in (*_COUNTS, "max_wait", "seed", *_SHARES, *_WORDS)})
        for name in _COUNTS:
            object.__setattr__(self, name, int(getattr(self, name)))  # 2.0 is a whole number as well
        if self.source_weights is not None and not self.shuffle:
            raise ValueError("source_weights draw samples at random, and shuffle=False keeps the order: take one.")

    @property
    def unusable(self) -> int:
        """How many samples cannot be trained on."""
        return int((self.table.shape_id < 0).sum()) if self.windows is None else self.windows.unusable

    def stream(self, epoch: int) -> NDArray[np.int64]:
        """Rows of the table in the order in which an epoch draws them."""
        if not self.shuffle:
            return np.flatnonzero(self.table.shape_id >= 0)
        return epoch_stream(self.table, epoch, self.seed, self.shard_window, self.source_weights)

    def plan(self, epoch: int, done: NDArray[np.bool_] | None = None, window: Window | None = None) -> EpochPlan:
        """Plans an epoch or a window of it, or what is left of either.

        Args:
            epoch: Its number, from 0.
            done: (draws,) which draws of the epoch's stream, or of the window's, are done already, under whatever
                settings; None: none.
            window: Which part of the epoch; None: the first window, or without windows the whole epoch.

        Raises:
            ValueError: If ``done`` or ``window`` are of an epoch of another number of draws.
        """
        if self.windows is not None:
            return self._plan_window(self.windows, epoch, done, window or self.windows.first())
        if self.redraw is not None:
            return replace(self, table=self.redraw(epoch), redraw=None).plan(epoch, done)
        stream = self.stream(epoch)
        shapes = self.table.shape_id[stream].astype(np.int64)
        left = _left(done, len(stream))
        layout = self._laid_out(shapes[left], self._key(epoch, left))
        is_rest = done is not None and self.loss_normalization == "epoch"
        normal = self._normal(self._cut(shapes, self._wait(shapes)) if is_rest else layout.batches)
        return self._planned(stream, left, layout, normal)

    def following(self, epoch: int, plan: EpochPlan) -> EpochPlan:
        """Plans the window behind one, with what that one leaves over.

        Args:
            epoch: Its number.
            plan: Of a window of the epoch, not the last.
        """
        assert self.windows is not None and plan.window is not None
        left = np.flatnonzero(~plan.done_after(plan.steps))
        return self.plan(epoch, window=self.windows.after(plan.window, left))

    def plans(self, epoch: int) -> Iterator[EpochPlan]:
        """Plans an epoch window by window; without windows, one plan is all of it."""
        plan = self.plan(epoch)
        yield plan
        while not plan.ends_epoch:
            plan = self.following(epoch, plan)
            yield plan

    def _plan_window(
        self, windows: EpochWindows, epoch: int, done: NDArray[np.bool_] | None, window: Window
    ) -> EpochPlan:
        _check_draws(window.total, windows.first().total)
        content = windows.content(epoch, window)
        planner = replace(self, table=content.table, windows=None)
        shapes = content.table.shape_id[content.stream].astype(np.int64)
        whole = planner._cut(shapes, planner._wait(shapes), fill=False)
        left = _left(done, len(shapes))
        key = (*self._key(epoch, left), *([window.first] if window.first else []))
        left_over, later_steps = np.empty(0, np.int64), 0
        if window.is_last:
            layout = planner._laid_out(shapes[left], key)
        else:
            wait = planner._wait(shapes[left])
            batches = whole if done is None else planner._cut(shapes[left], wait, fill=False)
            batches, left_over = whole_steps(batches, self._slots)
            layout = planner._layout(batches, key, wait)
            to_come = window.total - window.last + len(left_over)
            later_steps = max(1, round(len(whole.sizes) / self._slots * to_come / len(shapes)))
        is_all = window.is_last and not window.first and done is None
        normal = planner._normal(layout.batches) if is_all else self._normal_of_epoch(windows, epoch)
        plan = planner._planned(content.stream, left, layout, normal)
        return replace(plan, window=window, left_over=left[left_over], later_steps=later_steps)

    def _planned(
        self, stream: NDArray[np.int64], left: NDArray[np.int64], layout: Arrangement, normal: float | None
    ) -> EpochPlan:
        """The plan of a layout of the draws that are left of a stream."""
        batches, grid, filler = layout.batches, layout.grid, layout.filler
        sizes, shape_id = batches.sizes[layout.number], batches.shape_id[layout.number]
        fillers = layout.number[filler]
        members = np.concatenate([batches.members, *(_span(batches.starts, batches.members, n) for n in fillers)])
        return EpochPlan(
            table=self.table,
            stream=stream,
            members=left[members],
            starts=np.r_[0, np.cumsum(sizes)],
            shape_id=shape_id,
            cost=layout.cost,
            filler=filler,
            grid=grid,
            weight=self._weights(self._amounts(sizes, shape_id, filler)[grid], normal),
            cost_version="" if self.step_time is None else self.step_time.version,
        )

    def _key(self, epoch: int, left: NDArray[np.int64]) -> tuple[int, ...]:
        return self.seed, epoch if self.shuffle else 0, len(left), _ARRANGE

    def _laid_out(self, shapes: NDArray[np.int64], key: tuple[int, ...]) -> Arrangement:
        """Cuts and arranges samples of these shapes, which are in the order of the stream; the key names the draws."""
        wait = self._wait(shapes) if len(shapes) else None  # nothing may be left of an epoch
        batches = self._cut(shapes, wait)
        own = self._layout(batches, key, wait)
        if wait is None or len(own.grid) > wait:
            return own
        # In so few steps no micro-batch waits too long, so that filling them to the brim makes as many.
        full = self._cut(shapes, None)
        in_order = self._layout(full, key, None)  # as `dual_constraint`
        if own.is_no_worse_than(in_order):
            return own
        others = self._layout(full, key, wait), self._layout(batches, key, None)
        no_worse = (each for each in (own, *others, in_order) if each.is_no_worse_than(in_order))
        return min(no_worse, key=lambda each: each.over(in_order))

    def _layout(self, batches: Batches, key: tuple[int, ...], max_wait: float | None) -> Arrangement:
        """Arranges them, balanced over so many steps; None: in the order of the stream."""
        cost = self._costs(batches.sizes, batches.shape_id)
        fillers = -len(cost) % self._slots
        # The cheapest micro-batch again, at the end: all of its samples count elsewhere.
        number = np.r_[np.arange(len(cost)), np.full(fillers, np.argmin(cost) if fillers else 0)]
        cost, position = cost[number], np.r_[batches.position, np.full(fillers, 1.0)]
        ranks, k, draws = self.dp_size, self.micro_batches, SeededRandom(*key)
        if max_wait is None or not len(cost):
            return Arrangement(batches, number, cost, in_stream_order(position, ranks, k, draws))
        shape_id = batches.shape_id[number]
        is_filler = np.arange(len(number)) >= len(batches.sizes)
        amount = self._amounts(batches.sizes[number], shape_id, is_filler & (self.loss_weighting != "none"))
        grid = balanced(cost, position, shape_id, amount, ranks, k, max_wait, self.min_diversity, draws)
        return Arrangement(batches, number, cost, grid)

    def _wait(self, shapes: NDArray[np.int64]) -> float | None:
        """Steps that samples of a stream of these shapes wait for each other at most; None: however long it takes."""
        if self.balance != "planned":
            return None
        if self.max_wait is not None:
            return self.max_wait
        return affordable_wait(shapes, self.batch_sizes, self._costs, self._slots)

    @property
    def _slots(self) -> int:
        """Micro-batches of a step over all ranks."""
        return self.dp_size * self.micro_batches

    def _cut(self, shapes: NDArray[np.int64], max_wait: float | None, fill: bool = True) -> Batches:
        return cut(shapes, self.batch_sizes, self._costs(1), self._slots, max_wait, fill)

    @property
    def batch_sizes(self) -> NDArray[np.int64]:
        """(shapes,) samples that a micro-batch of each shape holds at most."""
        budget = self.budget.memory_alone() if self.balance == "equal_token" else self.budget
        return budget.batch_sizes(self.table.sequence_lengths)

    def _costs(
        self, samples: NDArray[np.int64] | int, shape_id: NDArray[np.int64] | slice = slice(None)
    ) -> NDArray[np.float64]:
        lengths = self.table.sequence_lengths[shape_id]
        if self.step_time is not None:
            return self.step_time.predict(samples, lengths)
        unit = np.array([self.budget.cost(1, s) for s in self.table.sequence_lengths.tolist()])
        costs: NDArray[np.float64] = unit[shape_id] * samples
        return costs

    def _amounts(
        self, sizes: NDArray[np.int64], shape_id: NDArray[np.int64], filler: NDArray[np.bool_] | bool = False
    ) -> NDArray[np.float64]:
        """What each micro-batch counts: its samples, its tokens, or one; (M,)."""
        tokens = self.table.sequence_lengths[shape_id] if self.loss_weighting == "token" else 1
        return np.where(filler, 0, 1 if self.loss_weighting == "none" else sizes * tokens).astype(np.float64)

    def _weights(self, amount: NDArray[np.float64], normal: float | None) -> NDArray[np.float64]:
        """Weights of what each slot counts, (steps, ranks, micro_batches).

        A step's gradient is the mean over its slots of weighted means. Where what counts is divided by its sum over the
        step, that is the mean over the step's samples; but then a sample counts less in a step of many, and steps
        differ in size by what their shapes are. Divided by the same number in every step, no sample counts less.

        Args:
            amount: (steps, ranks, micro_batches) what each slot counts.
            normal: What a step counts on average over the epoch; None: what each step does.
        """
        if self.loss_weighting == "none":
            return amount
        sums: NDArray[np.float64] = amount.sum(axis=(1, 2), keepdims=True)
        weights: NDArray[np.float64] = amount * self._slots / (sums if normal is None else normal)
        return weights

    def _normal(self, batches: Batches, times: float = 1.0) -> float | None:
        """What a step counts on average, where an epoch has so many times these; None where every step counts alike."""
        if self.loss_normalization == "step":
            return None
        total = self._amounts(batches.sizes, batches.shape_id).sum() * times
        return float(total / math.ceil(len(batches.sizes) * times / self._slots))

    def _normal_of_epoch(self, windows: EpochWindows, epoch: int) -> float | None:
        """The same for an epoch in windows, as if all were as the first is: one number for all of them."""
        if self.loss_normalization == "step":
            return None
        window = windows.first()
        table, stream = windows.content(epoch, window)
        planner = replace(self, table=table, windows=None)
        shapes = table.shape_id[stream].astype(np.int64)
        whole = planner._cut(shapes, planner._wait(shapes), fill=False)
        return planner._normal(whole, window.total / len(stream))


def _left(done: NDArray[np.bool_] | None, draws: int) -> NDArray[np.int64]:
    """Which of some draws are not done, ascending; raises as `_check_draws`."""
    if done is None:
        return np.arange(draws)
    _check_draws(len(done), draws)
    return np.flatnonzero(~done)


def _check_draws(before: int, now: int) -> None:
    """Raises ValueError if an epoch was begun with another number of draws."""
    if before != now:
        raise ValueError(
            f"What is done is told of {before} draws, and there are {now}: other samples can be trained on than when "
            "the epoch was begun, so which are done with cannot be told any more. Give the geometry that it was begun "
            "with, or start a new run from the weights."
        )


def _span(starts: NDArray[np.int64], members: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    return members[starts[number] : starts[number + 1]]
