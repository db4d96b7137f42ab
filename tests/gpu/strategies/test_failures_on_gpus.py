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

Case = tuple[str, str, str]
CASES: list[Case] = [
    *product(["ddp", "fsdp2"], ["collective", "symmetric"], ["raise", "kill", "hang"]),
    *product(["ddp"], ["graphs"], ["raise", "kill"]),  # collectives whose peers wait in a replay
]
TIMEOUT = 15.0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Job]]:
    """All cases at once: they mostly wait."""
    started = {}
    for strategy, transport, fault in CASES:
        args = ["--strategy", strategy, "--fault", fault, "--rank", "1"]
        args += ["--graphs"] if transport == "graphs" else ["--transport", transport]
        args += ["--timeout", str(TIMEOUT), "--accelerator", "gpu"]
        folder = tmp_path_factory.mktemp(f"{strategy}-{transport}-{fault}")
        started[strategy, transport, fault] = Job(folder, "torchrun", *args)
    yield started
    for job in started.values():
        job.end()


def continue_from(folder: Path, strategy: str, transport: str) -> list[float]:
    (last,) = (folder / "checkpoints").glob(f"step={FAILING_STEP}.ckpt")
    graphs = transport == "graphs"
    how = "collective" if graphs else transport
    return train(strategy, None, Module(), start=last, transport=how, accelerator="gpu", graphs=graphs)


@pytest.mark.parametrize(("strategy", "transport", "fault"), CASES)
def test_a_failing_rank_ends_the_job(
    gpu_ranks: Callable[[int], ProcessPool], jobs: dict[Case, Job], strategy: str, transport: str, fault: str
) -> None:
    job = jobs[strategy, transport, fault]
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
    losses = gpu_ranks(2).run(continue_from, job.folder, strategy, transport)
    assert [len(of_rank) for of_rank in losses] == [STEPS - FAILING_STEP] * 2
    assert losses[0] == pytest.approx(losses[1])
