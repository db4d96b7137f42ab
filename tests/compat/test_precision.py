"""Settings of products are read as both the old and the new names set them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from lightning_videoscale.compat.torch.precision import product_settings

READ = "from lightning_videoscale.compat.torch.precision import *"
SET = {  # whether products of float32 are coarse on a GPU then
    "pass": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.set_float32_matmul_precision('highest')": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
    "torch.backends.fp32_precision = 'tf32'": True,
}


IN_FRESH_PROCESSES = f"""
import os, sys
import torch
{READ}
for setting in sys.argv[1:]:
    if not (child := os.fork()):  # each has what torch starts with
        exec(setting)
        product_settings()
        print(float32_products_are_coarse("cuda"), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, setting
"""


def test_settings_of_products() -> None:
    command = [sys.executable, "-c", IN_FRESH_PROCESSES, *SET]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert dict(zip(SET, done.stdout.split(), strict=True)) == {setting: str(coarse) for setting, coarse in SET.items()}


@pytest.mark.parametrize(
    ("owner", "setting"),
    [
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
        (torch.backends.cudnn, "enabled"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "deterministic"),
    ],
)
def test_each_setting_of_products_counts(owner: Any, setting: str) -> None:
    before, was_on = product_settings(), getattr(owner, setting)
    setattr(owner, setting, not was_on)
    try:
        assert sum(old != new for old, new in zip(before, product_settings(), strict=True)) == 1
    finally:
        setattr(owner, setting, was_on)
    assert product_settings() == before
