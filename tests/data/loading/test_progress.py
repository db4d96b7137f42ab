"""A place in an epoch: what is kept, and what a run with the same or other settings makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.planning import BucketPlanner
from tests.data.planning.tables import table_of

PLANNER = BucketPlanner(table_of([i % 5 for i in range(200)]), BucketBudget(200, 200**2), dp_size=2, micro_batches=2)


def seen(progress: Progress, micro_batches: int) -> list[int]:
    """Samples that all ranks train on until they have counted so many micro-batches of the epoch."""
    first = progress.steps * progress.micro_batches
    count = micro_batches - progress.done
    found = []
    for rank in range(progress.plan.grid.shape[1]):
        planned = list(progress.plan.micro_batches_of(rank, first))[:count]
        found += [s for m in planned if m.meta.loss_weight for s in m.samples]
    return found


def test_the_same_settings_go_on_with_the_same_plan() -> None:
    whole = Progress.start(PLANNER, epoch=3)
    state = whole.state_dict(micro_batches=7)
    again = Progress.resume(PLANNER, state)
    assert (again.epoch, again.steps, again.done, again.counted) == (3, 3, 6, 0), "half a step does not count"
    assert again.plan.digest == whole.plan.digest and len(again) == len(whole)
    rest = list(again.plan.micro_batches_of(1, first=6))
    assert rest == list(whole.plan.micro_batches_of(1))[6:]


def test_an_epoch_that_is_done_is_followed_by_the_next() -> None:
    whole = Progress.start(PLANNER, epoch=3)
    again = Progress.resume(PLANNER, whole.state_dict(len(whole)))
    assert (again.epoch, again.done, again.begun) == (4, 0, None)
    assert again.plan.digest == Progress.start(PLANNER, 4).plan.digest


def test_the_rest_of_an_epoch_that_was_cut_short_is_an_epoch_of_its_own_and_none_is_left_out() -> None:
    cut = Progress.start(PLANNER, epoch=3)
    rest = Progress.resume(PLANNER, cut.state_dict(8, has_ended=True))
    assert (rest.epoch, rest.trained_as, rest.done) == (3, 4, 0)
    assert sorted(seen(cut, 8) + seen(rest, len(rest))) == list(range(200))
    following = Progress.resume(PLANNER, rest.state_dict(len(rest), has_ended=True))
    assert (following.epoch, following.trained_as, following.done) == (4, 5, 0)


def test_an_epoch_that_goes_on_beside_a_longer_one_is_read_again() -> None:
    whole = Progress.start(PLANNER, epoch=3)
    again = Progress.resume(PLANNER, whole.state_dict(len(whole) + 5, repeats=True))
    assert (again.epoch, again.trained_as, again.done) == (3, 3, len(whole) + 4)
    assert sorted(seen(again, len(again))) == list(range(200))


def test_an_epoch_that_is_limited_has_no_rest() -> None:
    following = Progress.resume(PLANNER, Progress.start(PLANNER, epoch=3).state_dict(8, is_over=True))
    assert (following.epoch, following.trained_as, following.done) == (4, 4, 0)


def test_a_state_of_another_release_is_refused() -> None:
    state = Progress.start(PLANNER, 0).state_dict(2)
    with pytest.raises(ValueError, match="version 99"):
        Progress.resume(PLANNER, {**state, "version": 99})


planners = st.builds(
    replace,
    st.just(PLANNER),
    dp_size=st.integers(1, 6),
    micro_batches=st.integers(1, 4),
    balance=st.sampled_from(["planned", "dual_constraint", "equal_token"]),
    budget=st.builds(BucketBudget, st.floats(10, 1000), st.floats(10, 1e6)),
)


SINGLES = replace(PLANNER, budget=BucketBudget(10, 10), dp_size=1, micro_batches=1)
"""One sample in a micro-batch: steps of one and of two are planned of the same numbers."""


@given(st.lists(st.tuples(planners, st.floats(0, 1)), min_size=1, max_size=8))
@example([(SINGLES, 0.5), (replace(SINGLES, micro_batches=2), 0.0)])
def test_every_sample_once_however_often_a_run_stops_and_whatever_changes(
    legs: list[tuple[BucketPlanner, float]],
) -> None:
    trained: list[int] = []
    state = None
    for planner, share in legs:
        progress = Progress.start(planner, 0) if state is None else Progress.resume(planner, state)
        if progress.epoch > 0:
            break
        assert progress.done % progress.micro_batches == 0, "the Trainer's steps begin where the plan's do"
        stop = progress.done + round(share * (len(progress) - progress.done))
        whole_steps = stop - stop % progress.micro_batches
        trained += seen(progress, whole_steps)
        state = progress.state_dict(stop)
    else:
        progress = Progress.resume(PLANNER, state)
        if progress.epoch == 0:
            trained += seen(progress, len(progress))
    assert sorted(trained) == list(range(200))
