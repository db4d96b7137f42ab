"""Tiny CogView4."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogView4Transformer2DModel

from tests.distributed.families.harness import Family


def build(**_: Any) -> CogView4Transformer2DModel:
    return CogView4Transformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=8,
        time_embed_dim=16,
        condition_dim=4,
        rope_axes_dim=(16, 16),
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, tables: bool = False, **_: Any
) -> dict[str, Any]:
    angles = torch.randn(frames * side * side, 4).repeat(1, 2)
    sizes = torch.tensor([[64.0, 48.0]]).expand(batch, -1)
    return {
        "hidden_states": torch.randn(batch, 4, frames * side, side),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.randint(0, 1000, (batch,)),
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": torch.zeros(batch, 2),
        "image_rotary_emb": (angles.cos(), angles.sin()) if tables else None,
    }


FAMILIES = {"cogview4": Family(build, inputs, [{}, {"tables": True}])}
