"""SIGTERM anywhere in training: all ranks end alike, with a checkpoint, from which every sample is trained once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from lightning_videoscale.strategies.failures.stopping import EXIT_CODE, StopAgreement
from tests.data.clips import write_shards
from tests.data.ledger import check_once, check_steps, lineage
from tests.strategies.failures.jobs import Job
from tests.strategies.failures.stopped_training import newest, train

SAMPLES = 61
WITHIN = 60.0  # s to stop, on a machine that has other things to do
Case = tuple[str, int]  # strategy, ranks per group
CASES: list[Case] = [("ddp", 2), ("fsdp2", 1)]
ALL: list[Case] = [("ddp", 1), *CASES, ("fsdp2", 2)]
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def prepare(folder: Path) -> Path:
    write_shards(folder / "shards", SAMPLES, shards=3)
    (folder / "runs").mkdir()
    return folder


def await_training(job: Job, folder: Path, run: int) -> None:
    """Returns once all ranks have trained on a micro-batch."""
    deadline = time.monotonic() + 180  # where the first job of a session imports everything
    while not all((folder / "runs" / f"run{run}-rank{rank}.jsonl").exists() for rank in range(len(job.processes))):
        assert time.monotonic() < deadline and all(process.is_alive() for process in job.processes), job.output()
        time.sleep(0.01)


def check_stopped(job: Job, folder: Path) -> None:
    codes = job.wait(WITHIN)
    assert codes == [EXIT_CODE] * len(codes), job.output()
    checkpoint = newest(folder / "runs")
    assert checkpoint is not None, job.output()
    assert CheckpointFolder(checkpoint).rest["global_step"] >= 0


def check_all_trained_once(folder: Path, runs: int, micro_batches: int) -> None:
    steps = lineage(folder / "runs")
    check_steps(steps, [micro_batches] * runs)
    check_once(steps, [f"{i % 3:03}.tar/clip{i:05}" for i in range(SAMPLES)])


def stop_and_go_on(folder: Path, case: Case, seed: int, backend: str = "gloo") -> None:
    """One rank or both are asked to end, at different times, anywhere; then another run trains what is left."""
    strategy, sp = case
    draw = random.Random(seed)
    prepare(folder)
    run = partial(train, strategy, sp, accelerator="cpu" if backend == "gloo" else "gpu")
    job = Job(folder / "logs0", 2, run, 0, folder, backend=backend)
    await_training(job, folder, 0)
    time.sleep(draw.uniform(0, 1.2))
    for rank in draw.choice([[0], [1], [0, 1], [1, 0]]):
        job.signal(rank)
        time.sleep(draw.uniform(0, 0.2))
    check_stopped(job, folder)
    last = Job(folder / "logs1", 2, run, 1, folder, backend=backend)
    assert last.wait(90) == [0, 0], last.output()
    check_all_trained_once(folder, runs=2, micro_batches=2 // sp * 2)


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future[None]]]:
    with ThreadPoolExecutor(2) as threads:
        yield {
            case: threads.submit(stop_and_go_on, tmp_path_factory.mktemp("chain"), case, seed)
            for seed, case in enumerate(CASES)
        }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sigterm_ends_all_ranks_after_the_same_step(stops: dict[Case, Future[None]], case: Case) -> None:
    stops[case].result()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 130))
def test_sigterm_anywhere(tmp_path: Path, seed: int) -> None:
    stop_and_go_on(tmp_path, ALL[seed % len(ALL)], seed)


def test_slurm_queues_the_job_again(tmp_path: Path) -> None:
    """The signal reaches one rank, and the job's next run finds its checkpoint by itself."""
    prepare(tmp_path)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    scontrol.chmod(0o755)
    environment = SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = Job(tmp_path / "logs0", 2, train, "ddp", 2, 0, tmp_path, None, environment=environment)
    await_training(job, tmp_path, 0)
    job.signal(1, signal.SIGUSR1)
    check_stopped(job, tmp_path)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
    again = Job(tmp_path / "logs1", 2, train, "ddp", 2, 1, tmp_path, None, environment=environment)
    assert again.wait(90) == [0, 0], again.output()
    check_all_trained_once(tmp_path, runs=2, micro_batches=2)


# -- where ranks stop ----------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> tuple[StopAgreement, StopAgreement]:
    return StopAgreement(0, 2), StopAgreement(1, 2)


def tell(agreements: tuple[StopAgreement, StopAgreement]) -> None:
    """What the ranks' threads do, twice: they tell, and they hear."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    for agreement in (*agreements, *agreements):
        agreement.look(store)


def test_the_rank_that_is_ahead_says_after_which_step(two: tuple[StopAgreement, StopAgreement]) -> None:
    slow, fast = two
    assert not any([slow.passes_step() for _ in range(3)] + [fast.passes_step() for _ in range(5)])
    slow.ask(requeue=False)
    tell(two)
    assert [slow.passes_step() for _ in range(3)] == [False, False, True]
    assert fast.passes_step()


def test_a_validation_is_left_where_it_is_as_long_on_all_ranks(two: tuple[StopAgreement, StopAgreement]) -> None:
    for agreement, batches in zip(two, (2, 4), strict=True):
        agreement.passes_step()
        assert not any(agreement.passes_validation_batch(9) for _ in range(batches))
    two[1].ask(requeue=True)
    tell(two)
    assert [two[0].passes_validation_batch(9) for _ in range(3)] == [False, False, True]
    assert two[1].passes_validation_batch(9)
    assert two[0].requeues and two[1].requeues


@pytest.mark.parametrize("lengths", [(9, 8), (None, None), (4, 4)])
def test_another_validation_is_completed(
    two: tuple[StopAgreement, StopAgreement], lengths: tuple[int | None, int | None]
) -> None:
    for agreement, length, batches in zip(two, lengths, (2, 4), strict=True):
        agreement.passes_step()
        assert not any(agreement.passes_validation_batch(length) for _ in range(batches))
    two[0].ask(requeue=False)
    tell(two)
    assert not any(two[0].passes_validation_batch(lengths[0]) for _ in range(2))
    assert two[0].passes_step() and two[1].passes_step()


def test_one_process_needs_no_agreement() -> None:
    alone = StopAgreement(0, 1)
    assert not alone.passes_step()
    alone.ask(requeue=False)
    assert alone.passes_validation_batch(None) and alone.passes_step()
