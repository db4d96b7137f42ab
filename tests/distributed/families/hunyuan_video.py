"""Tiny HunyuanVideo."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import HunyuanVideoTransformer3DModel

from tests.distributed.families.harness import Family


def build(condition: str | None = None, **_: Any) -> HunyuanVideoTransformer3DModel:
    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        text_embed_dim=8,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 2, 2),
        guidance_embeds=condition is None,
        image_condition_type=condition,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, condition: str | None = None, **_: Any
) -> dict[str, Any]:
    mask = torch.ones(batch, text, dtype=torch.int64)
    if text > 1:
        mask[0, -(text // 2) :] = 0
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 8),
        "guidance": torch.full((batch,), 6000.0) if condition is None else None,
    }


VARIANTS = [{"condition": condition} for condition in (None, "latent_concat", "token_replace")]

FAMILIES = {"hunyuan_video": Family(build, inputs, VARIANTS)}
