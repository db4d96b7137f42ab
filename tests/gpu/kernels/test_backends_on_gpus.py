"""Which backend a machine's facts lead to, in processes of their own, as it is decided once in each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
ONE = """
import torch
from lightning_videoscale.kernels import norm_modulate, qk_norm_rope
from lightning_videoscale.kernels.backend import resolve
x, q = torch.randn(1, 8, 64, device="cuda"), torch.randn(1, 8, 4, 64, device="cuda")
torch.testing.assert_close(norm_modulate(x), norm_modulate(x, backend="reference"))
torch.testing.assert_close(qk_norm_rope(q, q), qk_norm_rope(q, q, backend="reference"))
print(resolve(0))
"""
ONE_OF_TWO = """
import sys, torch
import torch.distributed as dist
from lightning_videoscale.kernels import norm_modulate
from lightning_videoscale.kernels.backend import settle
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
setting, meaning = settle("auto", torch.device("cuda:0"))
norm_modulate(torch.randn(1, 8, 64, device="cuda"), backend=setting)
print(setting, meaning)
dist.destroy_process_group()
"""


def start(code: str, *arguments: str, cache: str | None = None, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | ({} if cache is None else {"LIGHTNING_VIDEOSCALE_CACHE": cache}) | variables
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_cuda_where_nothing_is_missing() -> None:
    said, _ = (process := start(ONE)).communicate(timeout=200)
    heads = "cuda" if torch.cuda.get_device_capability() >= (9, 0) else "triton"
    assert process.returncode == 0 and f"norms and gates on cuda, GELU on cuda, qk_norm_rope on {heads}" in said, said


def test_triton_where_no_kernel_can_be_kept() -> None:
    said, _ = (process := start(ONE, cache="/proc/nothing/here")).communicate(timeout=200)
    assert process.returncode == 0, said
    assert "norms and gates on triton, GELU on triton, qk_norm_rope on triton" in said, said
    assert "LIGHTNING_VIDEOSCALE_CACHE" in said


def test_plain_pytorch_where_triton_cannot_keep_its_kernels_either() -> None:
    process = start(ONE, cache="/proc/nothing/here", TRITON_CACHE_DIR="/proc/nothing/here")
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert "norms and gates on reference, GELU on reference, qk_norm_rope on reference" in said, said
    assert "LIGHTNING_VIDEOSCALE_CACHE" in said and "triton: a first kernel failed" in said


def test_a_kernel_that_the_cache_cannot_keep_runs_nevertheless(tmp_path: Path) -> None:
    """A folder that can be written when the backend is chosen, and no longer when a kernel is compiled."""
    folder = str(tmp_path / "cache")
    gone = f"import shutil\nresolve(0)\nshutil.rmtree({folder!r})\nopen({folder!r}, 'w').close()\nx, q ="
    said, _ = (process := start(ONE.replace("x, q =", gone), cache=folder)).communicate(timeout=200)
    assert process.returncode == 0 and "norms and gates on cuda" in said, said


def test_ranks_take_what_all_can_run(tmp_path: Path) -> None:
    """The second cannot write its cache."""
    store = str(tmp_path / "store")
    processes = [start(ONE_OF_TWO, store, "0"), start(ONE_OF_TWO, store, "1", cache="/proc/nothing/here")]
    for process in processes:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert "rows=triton,reference gelu=triton,reference heads=triton,reference" in said, said
