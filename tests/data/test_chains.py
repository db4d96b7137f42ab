"""Runs that end anywhere, one after the other: every sample in exactly one step of what the last weights have seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.chains import chain_of, check, lineage, train
from tests.data.clips import write_shards

SAMPLES = 61


def run_chain(folder: Path, seed: int) -> None:
    """Trains all runs of a chain in this process and checks what the weights have seen."""
    chain = chain_of(seed)
    shards = write_shards(folder / "shards", SAMPLES, shards=3)
    names = [f"{i % 3:03}.tar/clip{i:05}" for i in range(SAMPLES)]
    datasets = [str(folder / "shards/000.tar"), str(folder / "shards/{001..002}.tar")]
    (folder / "runs").mkdir()
    try:
        for run in range(len(chain.legs)):
            train(chain, run, shards if chain.weights is None else datasets, folder / "runs")
        check(list(lineage(folder / "runs")), chain, names)
    except Exception as error:
        error.add_note(str(chain))
        raise


@pytest.mark.parametrize("seed", range(20))
def test_chain(tmp_path: Path, seed: int) -> None:
    run_chain(tmp_path, seed)
