"""`EMA` under every strategy: the average of what is trained, in checkpoints, in validation, and after failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_videoscale.strategies import read_weights
from tests.distributed.callbacks.averaging import carry, fail, refit, train, use
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed

Ranks = Callable[[int], ProcessPool]

STRATEGIES = [
    pytest.param("ddp", 2, marks=pytest.mark.full),
    ("fsdp2", 2),
    pytest.param("zero1", 1, marks=[needs_deepspeed, pytest.mark.full]),
    pytest.param("zero2", 2, marks=[needs_deepspeed, pytest.mark.full]),
    pytest.param("zero3", 1, marks=needs_deepspeed),
    pytest.param("zero3", 2, marks=[needs_deepspeed, pytest.mark.full]),
]
CARRIERS = [(1, "ddp"), (2, "fsdp2"), (1, "zero2"), (2, "zero3")]


def equal(first: Path, second: Path, averaged: bool) -> bool:
    """Whether two checkpoints hold the same weights, to the bit."""
    one, other = (read_weights(path, averaged=averaged) for path in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name].to(one[name])) for name in one)


@pytest.mark.parametrize(("name", "sp"), STRATEGIES)
def test_the_average_in_training_validation_and_after_a_restart(
    ranks: Ranks, tmp_path: Path, name: str, sp: int
) -> None:
    lora = name in ("fsdp2", "zero1")
    for outcome in ranks(2).run(train, name, sp, tmp_path, lora=lora):
        bound = 1e-6 if name.startswith("zero") else 1e-14
        assert max(outcome.average, outcome.validation) <= bound
        assert outcome.swapped_back
    averaged, plain = read_weights(tmp_path / "end.ckpt", averaged=True), read_weights(tmp_path / "end.ckpt")
    differ = {key for key in plain if not torch.equal(averaged[key], plain[key])}
    assert differ
    assert all("lora" in key for key in differ) is lora
    assert equal(tmp_path / "end.ckpt", tmp_path / "resumed.ckpt", averaged=True)
    assert equal(tmp_path / "end.ckpt", tmp_path / "resumed.ckpt", averaged=False)
    if name == "zero3":
        start = tmp_path / "half.ckpt"
        for size, other in CARRIERS if sp == 2 else CARRIERS[::3]:
            ranks(size).run(carry, other, start, tmp_path / other)
            assert equal(start, tmp_path / other, averaged=True)
            start = tmp_path / other


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero2", marks=[needs_deepspeed, pytest.mark.full])])
def test_the_average_after_training(ranks: Ranks, tmp_path: Path, name: str) -> None:
    for saved, tested, message in ranks(2).run(use, name, tmp_path):
        assert saved <= 1e-6
        assert tested <= 1e-6
        assert ("ckpt_path" in message) is name.startswith("zero")


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero3", marks=[needs_deepspeed, pytest.mark.full])])
def test_a_validation_that_fails_leaves_what_is_trained(ranks: Ranks, name: str) -> None:
    for outcome in ranks(2).run(fail, name, 2):
        assert outcome.validation <= 1e-6
        assert outcome.swapped_back
    ranks(2).stop()  # whose groups a failed run leaves open


@pytest.mark.parametrize("second", ["fsdp2", pytest.param("zero2", marks=needs_deepspeed)])
def test_averages_of_a_fit_that_shared_parameters_out_otherwise_are_refused(ranks: Ranks, second: str) -> None:
    for said in ranks(2).run(refit, "ddp", second):
        assert "otherwise than" in said and "ckpt_path=path" in said
    ranks(2).stop()  # whose groups a failed run leaves open
