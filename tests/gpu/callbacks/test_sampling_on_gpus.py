"""On GPUs: averages of shards and of ZeRO's pieces, and sampling that training does not notice."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_videoscale.strategies import read_weights
from tests.distributed.callbacks.averaging import train, use
from tests.distributed.callbacks.sampling import save_parts, train_and_sample
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]

GPUS = min(2, torch.cuda.device_count())

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
pytestmark = pytest.mark.gpu

BACKENDS = ["ddp", "fsdp2", *(pytest.param(f"zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3))]


@pytest.mark.parametrize("name", BACKENDS)
def test_the_average_in_training_validation_and_after_a_restart(gpu_ranks: Ranks, tmp_path: Path, name: str) -> None:
    for outcome in gpu_ranks(GPUS).run(train, name, GPUS, tmp_path):
        assert max(outcome.average, outcome.validation) <= (1e-6 if name.startswith("zero") else 1e-14)
        assert outcome.swapped_back
    end, resumed = (read_weights(tmp_path / f"{path}.ckpt", averaged=True) for path in ("end", "resumed"))
    assert all(torch.allclose(end[key], value, rtol=1e-5, atol=1e-6) for key, value in resumed.items())


@pytest.mark.parametrize("name", BACKENDS)
def test_the_average_after_training_when_parameters_are_on_the_host(
    gpu_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    for saved, tested, _ in gpu_ranks(GPUS).run(use, name, tmp_path):
        assert saved <= 1e-6
        assert tested <= 1e-5


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="PyAV is not installed")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("split", [False, True])
def test_losses_with_sampling_are_those_without(gpu_ranks: Ranks, tmp_path: Path, name: str, split: bool) -> None:
    parts = save_parts(tmp_path / "parts")
    assert all(gpu_ranks(GPUS).run(train_and_sample, name, GPUS if split else 1, parts, tmp_path / "samples"))
