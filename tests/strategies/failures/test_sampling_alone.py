"""A rank that draws a video by itself hears at once why that cannot work; one that is merely slow hears nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.strategies.failures.jobs import Job
from tests.strategies.failures.sampling_training import (
    train_and_sample_alone,
    train_and_sample_late,
    train_and_wait_beside_the_messages,
    train_by_rollouts,
    validate_and_sample_alone,
)

HOOKS = ("on_train_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end")
WITHIN = 30.0  # s from the call of the pipeline to the end of all processes
TIMEOUT = 20.0  # s
LATE = 9.0  # s: longer than it takes to be sure of a rank that does not come


class Case(NamedTuple):
    """One rank samples in a hook."""

    strategy: str
    sp: int
    rank: int
    hook: str


CASES = [Case("ddp", 2, 0, "on_train_start"), Case("fsdp2", 2, 1, "on_train_batch_end")]
MORE = [
    *(Case("ddp", 2, 0, hook) for hook in HOOKS[1:]),
    *(Case("fsdp2", 2, 0, hook) for hook in HOOKS),
    *(Case("fsdp2", 1, 1, hook) for hook in HOOKS),
    *(Case("ddp", 2, 1, hook) for hook in HOOKS),
]
Ended = tuple[list[int | None], str, float]


def end(job: Job) -> Ended:
    codes = job.wait(90)
    return codes, job.output(), time.time()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case | str, Future[Ended]]]:
    """All at a time, since each mostly waits."""
    with ThreadPoolExecutor(len(CASES) + 3) as threads:
        started: dict[Case | str, Future[Ended]] = {
            case: threads.submit(end, Job(tmp_path_factory.mktemp("job"), 2, train_and_sample_alone, *case))
            for case in CASES
        }
        late = Job(tmp_path_factory.mktemp("job"), 2, train_and_sample_late, "ddp", 2, 1, LATE, "on_train_batch_end")
        never = Job(
            tmp_path_factory.mktemp("job"),
            2,
            train_and_wait_beside_the_messages,
            "ddp",
            2,
            0,
            "on_train_batch_end",
            20.0,
        )
        rollouts = Job(tmp_path_factory.mktemp("job"), 4, train_by_rollouts)
        others = {"late": late, "never": never, "rollouts": rollouts}
        yield started | {name: threads.submit(end, job) for name, job in others.items()}


def check(ended: Ended, case: Case) -> None:
    codes, output, when = ended
    assert codes[case.rank], f"{codes}\n{output}"
    assert when - float(output.split("samples at ")[1].split()[0]) < WITHIN
    # By whichever rank the connection is lost first, the message names the rank that samples, and where.
    assert f"Rank {case.rank} is in call " in output or f"Rank {case.rank} was in call " in output, output
    assert f"Rank {1 - case.rank} is in call" not in output
    assert "of transformer without gradients" in output
    assert f"ranks [{1 - case.rank}]" in output
    assert "All of ranks [0, 1] must call this network together" in output


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_samples_alone_is_named(jobs: dict[Case | str, Future[Ended]], case: Case) -> None:
    check(jobs[case].result(), case)
    assert all(jobs[case].result()[0])


def test_a_rank_that_comes_late_is_waited_for(jobs: dict[Case | str, Future[Ended]]) -> None:
    codes, output, _ = jobs["late"].result()
    assert codes == [0, 0], output
    assert "in call" not in output


def test_a_wait_that_no_process_group_sees_has_the_timeout_too(jobs: dict[Case | str, Future[Ended]]) -> None:
    codes, output, _ = jobs["never"].result()
    assert all(codes), output
    assert "Rank 0 is in call " in output and "ranks [1] have not come to it for " in output, output
    assert "The first error of the job was on rank 0" in output


def test_groups_that_call_a_sharded_network_differently_often_are_named(jobs: dict[Case | str, Future[Ended]]) -> None:
    codes, output, _ = jobs["rollouts"].result()
    assert all(codes), output
    assert "of transformer with gradients" in output and "have gone on without it" in output, output
    assert "draw the length of a rollout from what all of them know, such as trainer.global_step" in output


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_any_rank_that_samples_alone_is_named(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    job = Job(tmp_path_factory.mktemp("job"), 2, train_and_sample_alone, *case)
    check(end(job), case)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_peers_that_have_ended_do_not_come(tmp_path_factory: pytest.TempPathFactory, strategy: str) -> None:
    case = Case(strategy, 2, 0, "on_validation_epoch_end")
    check(end(Job(tmp_path_factory.mktemp("job"), 2, validate_and_sample_alone, *case)), case)


@pytest.mark.full
def test_a_rank_that_comes_very_late_is_named_and_waited_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    late = 25.0
    job = Job(tmp_path_factory.mktemp("job"), 2, train_and_sample_late, "ddp", 2, 1, late, "on_train_batch_end")
    codes, output, _ = end(job)
    assert codes == [0, 0], output
    assert "Rank 0 is in call " in output and " of transformer without gradients" in output
    assert "ranks [1] have not come to it" in output
