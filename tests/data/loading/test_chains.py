"""Runs that end anywhere, one after the other: every sample in exactly one step of what the last weights have seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.chains import Chain, chain_of, in_windows, newest, train
from tests.data.clips import write_shards
from tests.data.killing import Processes
from tests.data.ledger import check_at_most_once, check_evenly, check_once, check_steps, lineage

SAMPLES = 61
QUICK = (4, 8, 9, 13)  # went wrong while Lightning's counters were trusted
QUICK_KILLS = 5  # with sequence-parallel groups and a change of strategy
QUICK_WINDOWS = (2, 9)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:Be aware that when using `ckpt_path`", "ignore:The dirpath has changed"
)


def run_chain(folder: Path, chain: Chain, start: Callable[[Chain, int, Path], object]) -> None:
    """Trains all runs of a chain, one after the other, and checks what the weights have seen."""
    write_shards(folder / "shards", SAMPLES, shards=3)
    (folder / "runs").mkdir()
    try:
        for run in range(len(chain.legs)):
            start(chain, run, folder)
        check(folder, chain)
    except Exception as error:
        error.add_note(f"This was {chain}.")
        raise


def check(folder: Path, chain: Chain) -> None:
    steps, samples = lineage(folder / "runs"), [f"{i % 3:03}.tar/clip{i:05}" for i in range(SAMPLES)]
    is_limited = chain.limit is not None
    check_steps(steps, None if is_limited else [leg.ranks // leg.sp * leg.micro_batches for leg in chain.legs])
    if is_limited:
        check_at_most_once(steps)
    elif chain.weights is None:
        check_once(steps, samples)
    else:
        check_evenly(steps, [name for name in samples if name.startswith("000")])
        check_evenly(steps, [name for name in samples if not name.startswith("000")])


def in_this_process(chain: Chain, run: int, folder: Path) -> None:
    train(chain, run, newest(folder / "runs"), folder)


@pytest.mark.parametrize("seed", QUICK)
def test_runs_that_end_anywhere(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, chain_of(seed), in_this_process)


@pytest.mark.full
@pytest.mark.parametrize("seed", sorted({*range(180)} - {*QUICK}))
def test_many_runs_that_end_anywhere(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, chain_of(seed), in_this_process)


@pytest.mark.parametrize("seed", QUICK_WINDOWS)
def test_runs_in_windows_that_end_anywhere(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, in_windows(chain_of(seed)), in_this_process)


@pytest.mark.full
@pytest.mark.parametrize("seed", sorted({*range(120)} - {*QUICK_WINDOWS}))
def test_many_runs_in_windows_that_end_anywhere(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, in_windows(chain_of(seed)), in_this_process)


def test_ranks_that_are_killed(tmp_path: Path) -> None:
    run_chain(tmp_path, chain_of(QUICK_KILLS, processes=True), Processes().train)


@pytest.mark.full
@pytest.mark.parametrize("seed", sorted({*range(20)} - {QUICK_KILLS}))
def test_many_ranks_that_are_killed(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, chain_of(seed, processes=True), Processes().train)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_many_ranks_in_windows_that_are_killed(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, in_windows(chain_of(seed, processes=True)), Processes().train)
