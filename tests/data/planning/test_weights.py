"""What loss weights make of the gradient, over steps and over epochs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.planning import Balance, BucketPlanner, EpochPlan, LossWeighting
from tests.data.planning.tables import BUDGET, WAN_14B, mixed, table_of

Values = NDArray[np.float64]


def step_gradients(plan: EpochPlan, gradients: Values) -> Values:
    """The gradient of every step, if that of a sample is one number and losses are means over micro-batches."""
    sizes = np.diff(plan.starts)
    of_batch = np.add.reduceat(gradients[plan.stream[plan.members]], plan.starts[:-1]) / sizes
    mean: Values = (plan.weight * of_batch[plan.grid]).mean(axis=(1, 2))
    return mean


def samples_of(plan: EpochPlan) -> Values:
    counted = np.where(plan.filler, 0, np.diff(plan.starts)).astype(np.float64)
    per_step: Values = counted[plan.grid].sum(axis=(1, 2))
    return per_step


@pytest.mark.parametrize(("dp_size", "micro_batches"), [(4, 1), (16, 4)])
def test_steps_weighted_by_their_samples_are_the_gradient_of_the_epoch(dp_size: int, micro_batches: int) -> None:
    table = mixed(20_000)
    gradients = np.random.default_rng(0).normal(size=20_000) + np.log(table.sequence_lengths[table.shape_id])
    plan = BucketPlanner(table, BUDGET, dp_size=dp_size, micro_batches=micro_batches, step_time=WAN_14B).plan(0)
    mean = np.average(step_gradients(plan, gradients), weights=samples_of(plan))
    assert mean == pytest.approx(gradients.mean(), rel=1e-12)


def test_token_weights_give_every_token_its_share(dp_size: int = 8) -> None:
    table = mixed(20_000)
    lengths = table.sequence_lengths[table.shape_id].astype(np.float64)
    gradients = np.random.default_rng(0).normal(size=20_000) + np.log(lengths)
    plan = BucketPlanner(table, BUDGET, dp_size=dp_size, step_time=WAN_14B, loss_weighting="token").plan(0)
    tokens = np.where(plan.filler, 0, np.diff(plan.starts) * table.sequence_lengths[plan.shape_id])
    mean = np.average(step_gradients(plan, gradients), weights=tokens[plan.grid].sum(axis=(1, 2)))
    assert mean == pytest.approx(np.average(gradients, weights=lengths), rel=1e-12)


@pytest.mark.parametrize("balance", ["planned", "dual_constraint"])
def test_the_expected_gradient_of_a_step_is_unbiased_where_batches_differ_in_size(balance: Balance) -> None:
    # Two shapes of equally many samples and of other gradients, in batches of 24 and of 2: a mean over micro-batches
    # counts the second twelve times as much.
    table = table_of([0] * 1000 + [2] * 1000)
    gradients = np.r_[np.zeros(1000), np.ones(1000)] + np.random.default_rng(0).normal(size=2000)
    budget = BucketBudget(m_mem=96, m_comp=1e9, p=1.0)

    def of_steps(weighting: LossWeighting) -> Values:
        plans = (
            BucketPlanner(table, budget, balance, 8, 4, loss_weighting=weighting, seed=s).plan(0) for s in range(60)
        )
        return np.concatenate([step_gradients(plan, gradients) for plan in plans])

    by_sample, by_batch = of_steps("sample"), of_steps("none")
    error = by_sample.std() / np.sqrt(len(by_sample))
    # A ratio of sums is unbiased up to the variation of its denominator, the samples of a step: below 0.01 here.
    assert abs(by_sample.mean() - gradients.mean()) < 4 * error + 0.01
    assert by_batch.mean() - gradients.mean() > 0.4
