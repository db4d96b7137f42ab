"""Over NCCL and symmetric memory: a rank raises, is killed or hangs, the other says so and ends, training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import ProcessPool
from tests.strategies.failures.failing_training import FAILING_STEP, STEPS, Module, train
from tests.strategies.failures.test_failures_in_training import MARGIN, Job, check_messages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Case = tuple[str, str, bool, str]
"""Strategy, transport, whether peers wait in a replay, and what goes wrong."""
CASES: list[Case] = [
    *product(["ddp", "fsdp2"], ["collective", "symmetric"], [False], ["raise", "kill", "hang", "memory"]),
    *product(["ddp"], ["collective", "symmetric"], [True], ["raise", "kill", "hang", "memory"]),
]
TIMEOUT = 15.0
AT_A_TIME = 6  # jobs


@pytest.fixture(scope="module")
def job_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], Job]]:
    """The job of a case. It was started some cases ahead, as jobs mostly wait; all at once would fill the host."""
    started: dict[Case, Job] = {}

    def get(case: Case) -> Job:
        for ahead in CASES[len(started) : CASES.index(case) + AT_A_TIME]:
            strategy, transport, graphs, fault = ahead
            args = ["--strategy", strategy, "--fault", fault, "--rank", "1", "--transport", transport]
            args += ["--graphs"] * graphs + ["--timeout", str(TIMEOUT), "--accelerator", "gpu"]
            started[ahead] = Job(tmp_path_factory.mktemp("-".join(map(str, ahead))), "torchrun", *args)
        return started[case]

    yield get
    for job in started.values():
        job.end()


def continue_from(folder: Path, strategy: str, transport: str, graphs: bool) -> list[float]:
    (last,) = (folder / "checkpoints").glob(f"step={FAILING_STEP}.ckpt")
    return train(strategy, None, Module(), start=last, transport=transport, accelerator="gpu", graphs=graphs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_failing_rank_ends_the_job(
    gpu_ranks: Callable[[int], ProcessPool], job_of: Callable[[Case], Job], case: Case
) -> None:
    job, (strategy, transport, graphs, fault) = job_of(case), case
    output, _ = job.wait(90)
    log = job.log.stat().st_mtime  # jobs are waited for one by one: the last words tell when each of them ended
    seconds = log - float(output.split("fails at ")[1].split()[0])
    assert job.process.returncode != 0
    assert seconds < MARGIN + (TIMEOUT if fault == "hang" else 0), output
    if fault == "hang" and transport == "symmetric":
        # Either the watch of the transport or that of the job sees it first.
        messages = "for ranks [1], which did not come", "Missing in a collective of ranks [0, 1]: rank 1"
        assert any(message in output for message in messages), output
    else:
        check_messages(output, fault, 1, TIMEOUT)
    losses = gpu_ranks(2).run(continue_from, job.folder, strategy, transport, graphs)
    assert [len(of_rank) for of_rank in losses] == [STEPS - FAILING_STEP] * 2
    assert losses[0] == pytest.approx(losses[1])
