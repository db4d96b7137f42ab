"""Tiny Mochi."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MochiTransformer3DModel
from diffusers.models.transformers.transformer_mochi import MochiRoPE

from tests.distributed.families.harness import Family
from tests.distributed.families.models.hunyuan_video import text_mask


def build(head_dim: int = 12, **_: Any) -> MochiTransformer3DModel:
    model = MochiTransformer3DModel(
        patch_size=1,
        num_attention_heads=4,
        attention_head_dim=head_dim,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=8,
        time_embed_dim=8,
    )
    model.rope = MochiRoPE(4, 4)  # of small positions, as rounded frequencies turn by their products
    return model


def inputs(batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, **_: Any) -> dict[str, Any]:
    """The first of several samples has padding; diffusers cuts it out before it attends."""
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_attention_mask": text_mask(batch, text).bool() | (batch == 1),
    }


FAMILIES = {"mochi": Family(build, inputs)}
