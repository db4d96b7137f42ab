"""Tiny Motif-Video."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MotifVideoTransformer3DModel

from tests.distributed.families.harness import Family
from tests.distributed.families.models.hunyuan_video import text_mask


def build(
    singles: int = 2, decoders: int = 0, cross: bool = False, image: int = 0, **_: Any
) -> MotifVideoTransformer3DModel:
    return MotifVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=singles,
        num_decoder_layers=decoders,
        mlp_ratio=2.0,
        patch_size=1,
        text_embed_dim=8,
        image_embed_dim=6 if image else None,
        rope_axes_dim=(4, 2, 2),
        enable_text_cross_attention_dual=cross,
        enable_text_cross_attention_single=cross,
    )


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    cross: bool = False,
    image: int = 0,
    masked: bool = True,
    **_: Any,
) -> dict[str, Any]:
    """Text that is attended to alone has a token on each rank."""
    text = text + 4 * cross
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "timestep": 1000 * torch.rand(batch),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "encoder_attention_mask": text_mask(batch, text) if masked else None,
        "image_embeds": torch.randn(batch, image, 6) if image else None,
    }


FAMILIES = {
    "motif_video": Family(
        build,
        inputs,
        [
            {"image": 5},
            {"decoders": 1, "masked": False},
            {"singles": 3, "decoders": 1, "cross": True, "image": 2},
            {"singles": 0},
        ],
        spread=0.2,
    )
}
