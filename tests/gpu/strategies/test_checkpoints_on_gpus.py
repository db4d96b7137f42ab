"""Over NCCL too, what one strategy saved any other continues."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from tests.distributed.pool import ProcessPool
from tests.distributed.strategies.resuming import Run, groups, read, train
from tests.models import gradient_error

Ranks = Callable[[int], ProcessPool]

GPUS = min(2, torch.cuda.device_count())

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 3e-5), ("bf16-mixed", 3e-2)])
def test_a_run_through_all_strategies(gpu_ranks: Ranks, tmp_path: Path, precision: Any, tolerance: float) -> None:
    ranks, ddp = gpu_ranks(GPUS), Run("ddp", GPUS, 1, 1)
    whole = tmp_path / "whole.ckpt"
    ranks.run(train, ddp, 6, torch.float32, None, whole, "gpu", precision)
    runs = [ddp, Run("zero", 1, 1, GPUS, 3), Run("fsdp2", GPUS, 1, 1), Run("zero", GPUS, 1, 1, 1)]
    runs += [Run("zero", 1, 1, GPUS, 2), Run("ddp", 1, 1, GPUS)]
    paths = [None, *(tmp_path / f"{epoch}.ckpt" for epoch in range(len(runs)))]
    for epoch, (run, (start, end)) in enumerate(zip(runs, pairwise(paths), strict=True)):
        ranks.run(train, run, epoch + 1, torch.float32, start, end, "gpu", precision)
    got, expected = (CheckpointFolder(path).rest["callbacks"]["Losses"]["losses"] for path in (paths[-1], whole))
    assert got == pytest.approx(expected, rel=tolerance)
    assert groups(paths[-1]) == groups(whole)
    weights, expected_weights = (
        {name: x for name, x in read(path).items() if name.startswith("weights")} for path in (paths[-1], whole)
    )
    assert gradient_error(weights, expected_weights) <= tolerance
