"""The `window` record: measured figures are those that the planner predicts, where the times are as predicted."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_videoscale.data.planning.figures import StepSpreads
from lightning_videoscale.report.records import window_record
from lightning_videoscale.timing import MicroBatchLoad, StepTimes, load_of
from tests.report.simulated import planner
from tests.timing.windows import window_of

STEPS, RANKS = 20, 8


def test_measured_and_predicted_spreads_are_one_figure() -> None:
    planned = planner(dp_size=RANKS)
    plan = planned.plan(epoch=0)
    metas = [[batch.meta for batch in plan.micro_batches_of(rank)][: 2 * STEPS] for rank in range(RANKS)]
    times = [[StepTimes(forward=meta.predicted_cost / 4, exchange=0.75 * meta.predicted_cost, wait=1.0) for meta in row]
             for row in metas]  # fmt: skip
    loads = [[load_of({"meta": meta}) or MicroBatchLoad() for meta in row] for row in metas]
    record, predicted = window_record(window_of(times, loads, [2] * STEPS)), StepSpreads.of(plan)
    for name in ("cv_step", "compute_cv", "cost_cv"):
        assert record[name] == pytest.approx(getattr(predicted, name)[:STEPS], abs=1e-12), name
        assert max(record[name]) > 0.01


@pytest.mark.parametrize(("in_slots", "idle", "predicted"), [(False, 0.0, 0.0), (True, 2.0, 1 / 3)])
def test_ranks_that_wait_in_every_micro_batch_are_idle_there(in_slots: bool, idle: float, predicted: float) -> None:
    """Two ranks are slow in turn: together their steps are even."""
    short, long = StepTimes(forward=1.0), StepTimes(forward=3.0)
    record = window_record(window_of([[short, long], [long, short]], micro_batches=[2], in_slots=in_slots))
    assert (record["cv_step"], record["idle_seconds"], record["even_idle_seconds"]) == ([0.0], idle, idle)
    assert record["slowest_seconds"] == 4.0 + idle and record["in_slots"] is in_slots

    plan = planner(dp_size=2).plan(epoch=0)
    cost = np.zeros(len(plan.cost))
    cost[plan.grid] = np.array([[1.0, 3.0], [3.0, 1.0]])
    assert StepSpreads.of(plan, cost, in_slots).idle == pytest.approx(predicted)


def test_a_group_and_its_fillers_count_once() -> None:
    load = MicroBatchLoad(2, 10, loss_weight=1.0, frames=1, height=4, width=4)
    filler = load._replace(loss_weight=0.0)
    quick, slow = StepTimes(forward=1.0, other=5.0), StepTimes(forward=1.0, exchange=0.5, data=0.25)
    window = window_of([[quick, quick], [slow, slow], [quick, slow]], [[load, filler]] * 3, dp_ranks=[0, 0, 1])
    record = window_record(window)
    assert (record["tokens"], record["samples"], record["seconds"]) == (2 * 20, 2 * 2, 3.5)
    assert record["cv_step"] == pytest.approx([1 / 3, 0.0]) and record["cost_cv"] is None
    assert record["batches"] == [[1, 4, 4, 10, 2, 4, 2, 1.5]]
    assert len(record["ranks"]["forward"]) == 3 and record["ranks"]["other"] == [10.0, 0.0, 5.0]
