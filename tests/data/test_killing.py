"""kill -9 at random points, with other ranks and workers after each: every sample in exactly one step all the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data.clips import write_shards
from tests.data.killing import HOOKS, Leg, Run


def random_leg(draw: random.Random, kill: bool = True) -> Leg:
    ranks = draw.randint(1, 3)
    return Leg(
        ranks=ranks,
        workers=draw.choice([0, 0, 1, 2]),
        micro_batches=draw.randint(1, 3),
        balance=draw.choice(["planned", "dual_constraint", "equal_token"]),
        every_n_steps=draw.randint(1, 2),
        kill=(draw.randrange(ranks), draw.choice(HOOKS), draw.randint(1, 5)) if kill else None,
    )


def epoch_with_kills(folder: Path, samples: int, kills: int, seed: int) -> int:
    """Trains one epoch and counts each sample; returns how many legs were killed before it was done."""
    draw = random.Random(seed)
    run = Run(write_shards(folder / "shards", samples, shards=4), folder / "checkpoints")
    killed = 0
    while not run.start(random_leg(draw, kill=killed < kills)):
        killed += 1
    trained = sorted(name for step in run.lineage() for name in step)
    assert trained == sorted(f"{i % 4:03}.tar/clip{i:05}" for i in range(samples))
    return killed


def test_an_epoch_with_a_few_kills(tmp_path: Path) -> None:
    assert epoch_with_kills(tmp_path, samples=120, kills=3, seed=0) >= 2


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_an_epoch_with_fifty_kills(tmp_path: Path) -> None:
    assert epoch_with_kills(tmp_path, samples=3000, kills=50, seed=1) == 50
