"""Over NCCL: a job that is asked to end, a rank that samples alone, and networks that are saved after training."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from tests.distributed.pool import ProcessPool
from tests.models import gradient_error
from tests.strategies.failures import test_sampling_alone as alone
from tests.strategies.failures.jobs import Job
from tests.strategies.failures.sampling_training import train_and_sample_alone
from tests.strategies.failures.test_stopping import CASES, Case, stop_and_go_on
from tests.strategies.fsdp2.training import ddp, fsdp2
from tests.strategies.test_whole_parameters import load_saved, save_after_fit, zero3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (`make install` installs it)"
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sigterm_ends_all_ranks_after_the_same_step(tmp_path: Path, case: Case) -> None:
    stop_and_go_on(tmp_path, case, CASES.index(case), "nccl")


@pytest.mark.parametrize("case", alone.CASES, ids=str)
def test_a_rank_that_samples_alone_is_named(tmp_path: Path, case: alone.Case) -> None:
    job = Job(tmp_path, 2, train_and_sample_alone, *case, "gpu", backend="nccl")
    alone.check(alone.end(job), case)


@pytest.mark.parametrize("adapter", ["diffusers", None])
@pytest.mark.parametrize("strategy", [fsdp2, pytest.param(zero3, marks=needs_deepspeed)])
def test_networks_save_themselves_after_fit(
    gpu_ranks: Callable[[int], ProcessPool], tmp_path: Path, adapter: str | None, strategy: Callable[..., Strategy]
) -> None:
    expected = gpu_ranks(1).run(save_after_fit, ddp, adapter, tmp_path / "ddp", "gpu")[0]
    gpu_ranks(2).run(save_after_fit, strategy, adapter, tmp_path / "sharded", "gpu")
    loaded = load_saved(adapter, tmp_path / "sharded")
    assert loaded.keys() == expected.keys()
    assert gradient_error(loaded, expected) < 1e-3
