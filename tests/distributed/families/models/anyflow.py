"""Tiny AnyFlow."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AnyFlowTransformer3DModel

from tests.distributed.families.harness import Family


def build(image: bool = False, delta: str = "r", **_: Any) -> AnyFlowTransformer3DModel:
    return AnyFlowTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=64,
        num_layers=2,
        image_dim=6 if image else None,
        rope_max_seq_len=32,
        deltatime_type=delta,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, image: bool = False, **_: Any
) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, frames, 4, side, side),
        "timestep": 500 + 500 * torch.rand(batch, frames),
        "r_timestep": 500 * torch.rand(batch, frames),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "encoder_hidden_states_image": torch.randn(batch, 3, 6) if image else None,
    }


FAMILIES = {"anyflow": Family(build, inputs, [{}, {"image": True, "delta": "t-r"}], spread=0.15)}
