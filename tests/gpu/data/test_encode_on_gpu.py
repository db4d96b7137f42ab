"""The VAE on a GPU makes the latents that it makes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.encoding.vae import DiffusersVae

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 1e-1)])
def test_encoding_on_a_gpu(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    scales = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.5, 1.0, 2.0, 4.0]}
    model = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **scales)
    model.save_pretrained(tmp_path)
    video = torch.randint(0, 256, (3, 9, 64, 96), dtype=torch.uint8)
    here = DiffusersVae(str(tmp_path), GEOMETRIES["wan2.1"]).encode(video)
    there = DiffusersVae(str(tmp_path), GEOMETRIES["wan2.1"], device="cuda", dtype=dtype).encode(video)
    assert there.shape == (4, 3, 8, 12) and there.device.type == "cpu" and there.dtype == torch.float32
    assert (there - here).norm() / here.norm() < tolerance
