"""Settings of products are read as both the old and the new names set them."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("setting", SET)
def test_settings_of_products(setting: str) -> None:
    code = f"import torch\n{READ}\n{setting}\nproduct_settings()\nprint(float32_products_are_coarse('cuda'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == (str(SET[setting]), 0), done.stderr
