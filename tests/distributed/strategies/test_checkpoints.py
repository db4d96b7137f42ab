"""What one strategy saved, any other continues, on any number of ranks, as if nothing had happened."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from tests.distributed.pool import ProcessPool
from tests.distributed.strategies.resuming import Run, groups, read, train
from tests.distributed.zero import needs_deepspeed
from tests.models import gradient_error

Ranks = Callable[[int], ProcessPool]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run, int, torch.dtype], Path]:
    """The checkpoint of a run that went through without a stop."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(run: Run, epochs: int, dtype: torch.dtype) -> Path:
        path = folder / f"{run}_{epochs}_{str(dtype)[6:]}.ckpt"
        if not path.exists():
            ranks(run.ranks).run(train, run, epochs, dtype, None, path)
        return path

    return get


def check(ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run) -> None:
    exact = "zero" not in (first.strategy, second.strategy)
    dtype, tolerance = (torch.float64, 1e-10) if exact else (torch.float32, 1e-6)
    expected = saved(ONE, 2, dtype)
    start, end = saved(first, 1, dtype), tmp_path / "end.ckpt"
    losses = ranks(second.ranks).run(train, second, 2, dtype, start, end)
    uninterrupted = CheckpointFolder(expected).rest["callbacks"]["Losses"]["losses"]
    assert len(uninterrupted) == 4
    for got in losses:
        assert got == pytest.approx(uninterrupted, rel=tolerance)
    assert gradient_error(read(end), read(expected)) <= tolerance
    got, wanted = groups(end), groups(expected)
    assert got == wanted
    assert [len(names) for *_, names in got] == [28, 37]


ONE = Run("ddp", 1, 1, 1)
DDP = [Run("ddp", 1, 1, 4), Run("ddp", 2, 1, 2), Run("ddp", 4, 1, 1)]
FSDP2 = [Run("fsdp2", 2, 1, 2), Run("fsdp2", 1, 2, 2)]
ZERO = [Run("zero", 2, 1, 2, 1), Run("zero", 1, 1, 4, 2), Run("zero", 2, 1, 2, 3)]
ALL = [ONE, *DDP, *FSDP2, *ZERO]
SOME = [
    (FSDP2[0], DDP[2]),
    (DDP[1], FSDP2[1]),
]
SOME_ZERO = [(FSDP2[1], ZERO[2])]  # one that ZeRO-3 saved is continued in strategies/checkpoints/test_urls.py


@pytest.mark.parametrize(("first", "second"), SOME, ids=str)
def test_saved_by_one_continued_by_another(ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run) -> None:
    check(ranks, saved, tmp_path, first, second)


@needs_deepspeed
@pytest.mark.parametrize(("first", "second"), SOME_ZERO, ids=str)
def test_saved_by_one_continued_by_another_with_zero(
    ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run
) -> None:
    check(ranks, saved, tmp_path, first, second)


@needs_deepspeed
@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), list(itertools.product(ALL, ALL)), ids=str)
def test_every_pair(ranks: Ranks, saved: Any, tmp_path: Path, first: Run, second: Run) -> None:
    check(ranks, saved, tmp_path, first, second)
