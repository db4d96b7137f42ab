"""What every balance would have done with the clips that a run trained on, planned by the real planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.calibration import read_budget
from lightning_videoscale.data.planning import Balance, BucketPlanner, SampleTable
from lightning_videoscale.data.planning.figures import StepSpreads
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.report.reading import LoggedRecord

MOST_SAMPLES = 50_000
"""Of longer runs, as many samples in the same proportions are planned: a second's work."""


def budget_of(plan: LoggedRecord) -> Budget:
    """The budget of a `plan` record."""
    return read_budget(plan["budget"])


def seen_samples(windows: Sequence[LoggedRecord]) -> Counter[tuple[int, int, int, int]]:
    """How many samples of each (frames, height, width, S) were trained on; fillers, which repeat samples, left out."""
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for window in windows:
        for frames, height, width, tokens, samples, count, fillers, _ in window["batches"]:
            seen[frames, height, width, tokens] += samples * (count - fillers)
    return +seen


def predict_balances(
    windows: Sequence[LoggedRecord], plan: LoggedRecord, step_time: StepTimeModel | None, in_slots: bool = False
) -> dict[Balance, StepSpreads]:
    """Plans the samples that a run saw with every balance, by its budget and its step-time model.

    Args:
        windows: The run's `window` records.
        plan: Its `plan` record.
        step_time: What the micro-batches really take, to judge the plans by; None: what the planner balances.
        in_slots: Whether ranks wait for each other in every micro-batch.

    Returns:
        Per balance, how unequal the ranks are in each step. Empty with one data-parallel rank, or without samples.
    """
    seen = seen_samples(windows)
    if plan["dp_size"] < 2 or not seen:
        return {}
    table = _table(seen)
    budget = budget_of(plan)
    model = plan["step_time"] and StepTimeModel.from_dict(plan["step_time"])
    spreads: dict[Balance, StepSpreads] = {}
    for balance in get_args(Balance):
        planner = BucketPlanner(
            table, budget, balance, plan["dp_size"], plan["micro_batches"], model, seed=plan["seed"]
        )
        epoch = planner.plan(epoch=0)
        lengths = table.sequence_lengths[epoch.shape_id]
        cost = None if step_time is None else step_time.predict(np.diff(epoch.starts), lengths)
        spreads[balance] = StepSpreads.of(epoch, cost, in_slots)
    return spreads


def _table(seen: Counter[tuple[int, int, int, int]]) -> SampleTable:
    total = seen.total()
    share = min(1.0, MOST_SAMPLES / total)
    counts = [max(1, round(count * share)) for count in seen.values()]
    shapes: list[Any] = [ClipShape(frames, height, width) for frames, height, width, _ in seen]
    lengths = np.array([tokens for *_, tokens in seen], np.int64)
    return SampleTable.create(shapes, lengths, np.repeat(np.arange(len(shapes)), counts).astype(np.int32))
