"""A rank raises, is killed or hangs in a Trainer's run: the others say so and end; the last checkpoint continues."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed
from tests.scripts import start_torchrun
from tests.strategies.failures import jobs as forked
from tests.strategies.failures.failing_training import FAILING_STEP, STEPS, Module, train
from tests.strategies.failures.test_failure import wait_until_all_ended

Ranks = Callable[[int], ProcessPool]
LAUNCHERS = {
    "lightning": [],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"],
}
MARGIN = 15.0  # s in which the ranks have ended after an error, or after a collective's timeout


class Job:
    """`python -m tests.strategies.failures.failing_training` with a fault, in processes of its own."""

    def __init__(self, folder: Path, launcher: str, *args: str) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        command = [sys.executable, *LAUNCHERS[launcher], "-m", "tests.strategies.failures.failing_training"]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(folder / "checkpoints"), *args],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=kept | {"OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[3],
                start_new_session=True,
            )

    def wait(self, seconds: float) -> tuple[str, float]:
        """What all ranks printed, and how long after the fault the last process had ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.left():
            assert time.monotonic() < deadline, f"still running: {self.left()}\n{self.log.read_text()}"
            time.sleep(0.1)
        ended, output = time.time(), self.log.read_text()
        assert "fails at " in output, output
        return output, ended - float(output.split("fails at ")[1].split()[0])

    def left(self) -> list[str]:
        """Processes of this job that run: of its process group, and torchrun's by their arguments."""
        command = ["ps", "-eo", "pid=,pgid=,stat=,args="]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        running = [row for row in listing.splitlines() if "Z" not in row.split()[2]]
        mine = str(self.process.pid), str(self.folder / "checkpoints")
        return [row for row in running if row.split()[1] == mine[0] or mine[1] in row]

    def end(self) -> None:
        for row in self.left():
            os.kill(int(row.split()[0]), 9)


def check_messages(output: str, fault: str, rank: int, timeout: float) -> None:
    """The message names what happened and the rank, whichever ranks are left to print it."""
    if fault == "raise":
        assert f"The first error of the job was on rank {rank}: ValueError: the actual cause" in output
    if fault == "memory":
        assert f"The first error of the job was on rank {rank}: " in output
        assert "alloc" in output  # as both CPUs' and GPUs' allocators say
    if fault == "kill":
        assert f"rank {rank}: its process" in output
        assert "ended without a word, as when it is killed" in output
    if fault == "hang":
        assert f"Missing in a collective of ranks [0, 1]: rank {rank} (train, micro-batch 4, step 3, at " in output
        assert "failing_training.py" in output
        assert f"timeout of 0:00:{timeout:.0f} passes" in output or "imed out" in output


def fail(folder: Path, strategy: str, launcher: str, fault: str, rank: int) -> None:
    # Ranks that torchrun starts import together, and need no long timeout to find each other; only a hang waits for it.
    timeout = 150 if fault != "hang" else 20 if launcher == "torchrun" else 55
    args = ["--strategy", strategy, "--fault", fault, "--rank", str(rank), "--timeout", str(timeout)]
    job = Job(folder, launcher, *args)
    try:
        output, seconds = job.wait(240)
    finally:
        job.end()
    check_messages(output, fault, rank, timeout)
    assert job.process.returncode != 0
    assert seconds < MARGIN + (timeout if fault == "hang" else 0)


def train_until(strategy: str, folder: Path, fault: str, rank: int, timeout: float = 60) -> None:
    """Each rank makes its own module: one that is sent to it would share its memory with the other."""
    train(strategy, folder, Module(fault, rank), timeout=timeout)


def fail_under_torchrun(folder: Path, strategy: str, fault: str, rank: int) -> None:
    """As from the command line, and the ranks are forked: to import takes most of a job's seconds."""
    timeout, options = 20, ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    job = start_torchrun(folder, options, train_until, strategy, folder / "checkpoints", fault, rank, timeout)
    output = wait_until_all_ended(folder, job, seconds=5)
    check_messages(output, fault, rank, timeout)
    assert job.exitcode != 0
    assert time.time() - float(output.split("fails at ")[1].split()[0]) < MARGIN + (timeout if fault == "hang" else 0)


def fail_without_launcher(folder: Path, strategy: str, fault: str, rank: int) -> None:
    """The ranks are forked, and nobody ends one since another has ended."""
    job = forked.Job(folder / "logs", 2, train_until, strategy, folder / "checkpoints", fault, rank)
    codes, output, ended = job.wait(240), job.output(), time.time()
    check_messages(output, fault, rank, timeout=60)
    assert all(codes), output
    assert ended - float(output.split("fails at ")[1].split()[0]) < MARGIN


def end(folder: Path, strategy: str, launcher: str, fault: str, rank: int) -> None:
    ends = {"torchrun": fail_under_torchrun, "none": fail_without_launcher}
    ends[launcher](folder, strategy, fault, rank)


def continue_from(folder: Path, strategy: str) -> list[float]:
    (last,) = (folder / "checkpoints").glob(f"step={FAILING_STEP}.ckpt")
    return train(strategy, None, Module(), start=last)


def train_whole(strategy: str) -> list[float]:
    return train(strategy, None, Module())


def check_continuation(ranks: Ranks, folder: Path, strategy: str) -> None:
    whole = ranks(2).run(train_whole, strategy)
    continued = ranks(2).run(continue_from, folder, strategy)
    assert [len(losses) for losses in continued] == [STEPS - FAILING_STEP] * 2
    assert continued == [pytest.approx(losses[FAILING_STEP:], rel=1e-5) for losses in whole]


Case = tuple[str, str, str, int]
CASES: list[Case] = [
    ("fsdp2", "torchrun", "hang", 1),  # mostly waits, so it comes first
    ("ddp", "none", "kill", 0),  # as where Lightning has started rank 1: nobody ends it
    ("deepspeed", "none", "raise", 1),  # with launchers: test_failure.py
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, tuple[Path, Future[None]]]]:
    """The folder of each case and its job; two at a time, since a job mostly imports on one core, and waits."""
    with ThreadPoolExecutor(2) as threads:
        folders = {case: tmp_path_factory.mktemp("-".join(map(str, case))) for case in CASES}
        yield {case: (folder, threads.submit(end, folder, *case)) for case, folder in folders.items()}


@needs_deepspeed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_failing_rank_ends_the_job(ranks: Ranks, jobs: dict[Case, tuple[Path, Future[None]]], case: Case) -> None:
    folder, ended = jobs[case]
    ended.result()
    check_continuation(ranks, folder, case[0])


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["raise", "kill", "hang", "memory"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_every_failure_ends_the_job(
    ranks: Ranks, tmp_path: Path, strategy: str, launcher: str, fault: str, rank: int
) -> None:
    fail(tmp_path, strategy, launcher, fault, rank)
    check_continuation(ranks, tmp_path, strategy)
