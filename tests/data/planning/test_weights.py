"""What loss weights make of the gradient, over steps and over epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.planning import Balance, BucketPlanner, EpochPlan, LossUnit
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


@pytest.mark.parametrize("balance", ["planned", "dual_constraint", "equal_token"])
@pytest.mark.parametrize("weighting", ["sample", "token"])
def test_normalised_over_the_epoch_the_mean_over_steps_is_that_of_one_big_batch(
    balance: Balance, weighting: LossUnit
) -> None:
    table = mixed(20_000)
    lengths = table.sequence_lengths[table.shape_id].astype(np.float64)
    gradients = np.random.default_rng(0).normal(size=20_000) + np.log(lengths)
    plan = BucketPlanner(
        table, BUDGET, balance, 16, 2, WAN_14B, loss_weighting=weighting, loss_normalization="epoch"
    ).plan(0)
    big_batch = np.average(gradients, weights=lengths if weighting == "token" else None)
    assert step_gradients(plan, gradients).mean() == pytest.approx(big_batch, rel=1e-10)


def test_a_step_is_the_sum_over_its_samples_by_what_a_step_has_on_average() -> None:
    table = mixed(5000)
    gradients = np.random.default_rng(0).normal(size=5000)
    planner = BucketPlanner(table, BUDGET, "planned", 4, 2, WAN_14B)
    by_step, by_epoch = (replace(planner, loss_normalization=over).plan(0) for over in ("step", "epoch"))
    share = samples_of(by_step) / (5000 / by_step.steps)
    assert share.std() > 0.1
    assert step_gradients(by_epoch, gradients) == pytest.approx(step_gradients(by_step, gradients) * share, abs=1e-12)


def test_what_a_step_has_on_average_is_that_of_the_whole_epoch_however_little_is_left() -> None:
    planner = BucketPlanner(mixed(5000), BUDGET, "planned", 4, 2, WAN_14B, loss_normalization="epoch")
    whole = planner.plan(0)
    rest = planner.plan(0, whole.done_after(whole.steps - 3))
    of_sample = [plan.weight / np.diff(plan.starts)[plan.grid] for plan in (whole, rest)]
    assert of_sample[1][of_sample[1] > 0] == pytest.approx(of_sample[0][of_sample[0] > 0][0])


@pytest.mark.parametrize("weighting", ["sample", "token"])
def test_steps_of_several_micro_batches_count_about_alike(weighting: LossUnit) -> None:
    def unevenness(planner: BucketPlanner) -> float:
        plan = planner.plan(0)
        lengths = plan.table.sequence_lengths[plan.shape_id] if weighting == "token" else 1
        counted = np.where(plan.filler, 0, np.diff(plan.starts) * lengths)[plan.grid].sum(axis=(1, 2))
        return float(counted.std() / counted.mean())

    planner = BucketPlanner(mixed(20_000), BUDGET, "planned", 4, 4, WAN_14B, loss_weighting=weighting)
    drawn = replace(planner, balance="dual_constraint")
    assert unevenness(planner) < 0.9 * unevenness(drawn)


def of_many_seeds(planner: BucketPlanner, gradients: Values, seeds: int = 40) -> Values:
    """The gradients of the first eight steps, (seeds, 8): those that a training of this length would make."""
    return np.array([step_gradients(replace(planner, seed=s).plan(0), gradients)[:8] for s in range(seeds)])


@pytest.mark.parametrize("balance", ["planned", "dual_constraint"])
def test_the_expected_gradient_is_unbiased(balance: Balance) -> None:
    # Two shapes of equally many samples and of other gradients, in batches of 24 and of 2: a mean over micro-batches
    # counts the second twelve times as much.
    table = table_of([0] * 1000 + [2] * 1000)
    gradients = np.r_[np.zeros(1000), np.ones(1000)] + np.random.default_rng(0).normal(size=2000)
    planner = BucketPlanner(table, BucketBudget(m_mem=96, m_comp=1e9, p=1.0), balance, 8, 4)

    def bias(**weights: Any) -> tuple[float, float]:
        """How far the mean of a training's steps is off, and its standard error."""
        of_seeds = of_many_seeds(replace(planner, **weights), gradients).mean(axis=1)
        return float(of_seeds.mean() - gradients.mean()), float(of_seeds.std() / np.sqrt(len(of_seeds)))

    off, error = bias(loss_normalization="epoch")
    assert abs(off) < 4 * error < 0.05
    # A mean over a step's samples is a ratio: unbiased up to the variation of how many they are.
    off, error = bias(loss_normalization="step")
    assert abs(off) < 4 * error + 0.01
    off, _ = bias(loss_weighting="none")
    assert off > 0.4


def test_in_a_mix_of_images_and_long_clips_only_the_epoch_gives_images_their_share() -> None:
    table = mixed(20_000)
    is_image = np.array([shape.frames == 1 for shape in table.shapes])[table.shape_id].astype(np.float64)
    planner = BucketPlanner(table, BUDGET, "planned", 16, 1, WAN_14B)
    share = {
        over: step_gradients(replace(planner, loss_normalization=over).plan(0), is_image).mean()
        for over in ("step", "epoch")
    }
    assert share["epoch"] == pytest.approx(is_image.mean(), rel=1e-10)
    assert share["step"] < 0.5 * is_image.mean(), "images come by the hundred, in few steps"


def test_a_normalisation_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_normalization='batch' .*\('step', 'epoch'\)"):
        BucketPlanner(table_of([0]), BUDGET, loss_normalization="batch")  # type: ignore[arg-type]
