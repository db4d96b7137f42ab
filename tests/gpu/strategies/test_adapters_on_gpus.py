"""Over NCCL too, checkpoints of adapters leave out the base, and fingerprints are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_videoscale.cli.export import export
from lightning_videoscale.strategies.checkpoints.fingerprints import Fingerprint
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from lightning_videoscale.strategies.checkpoints.frozen import LEFT_OUT
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed
from tests.models import gradient_error, tiny_wan
from tests.strategies.checkpoints.adapted import Adapted, look, stop_and_go_on
from tests.strategies.checkpoints.test_adapters import read

Ranks = Callable[[int], ProcessPool]

CPU = torch.device("cpu")
GPUS = min(2, torch.cuda.device_count())

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_fingerprints_do_not_depend_on_the_device(dtype: torch.dtype) -> None:
    x = (torch.randn(10_000_019, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    cuda = torch.device("cuda", 0)
    assert Fingerprint.of(x, CPU) == Fingerprint.of(x, cuda) == Fingerprint.of(x.to(cuda), cuda)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_stopped_continued_and_exported(gpu_ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    expected = gpu_ranks(GPUS).run(stop_and_go_on, strategy, "add_adapter", "dora", tmp_path)[0]
    got, wanted = read(tmp_path / "two.ckpt"), read(tmp_path / "whole.ckpt")
    assert gradient_error(got, wanted) <= 1e-5
    left_out = CheckpointFolder(tmp_path / "two.ckpt").rest["lightning_videoscale"][LEFT_OUT]
    base = Adapted().state_dict()
    assert len(left_out) == 69
    assert all(Fingerprint.of(base[name], CPU).to_dict() == saved for name, saved in left_out.items())
    export(tmp_path / "whole.ckpt", tmp_path / "adapter")
    model = tiny_wan()
    model.load_lora_adapter(tmp_path / "adapter", weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(look(model), expected, rtol=0, atol=1e-3)  # the GPU's products may round to TF32
