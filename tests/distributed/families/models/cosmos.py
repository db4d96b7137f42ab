"""Tiny Cosmos."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CosmosTransformer3DModel

from tests.distributed.families.harness import Family
from tests.distributed.families.models.hunyuan_video import text_mask


def build(learned: bool = True, image: bool = False, control: bool = False, **_: Any) -> CosmosTransformer3DModel:
    """The context of an image is as wide as the tokens."""
    return CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        text_embed_dim=64 if image else 8,
        adaln_lora_dim=4,
        max_size=(8, 8, 8),
        patch_size=(1, 1, 1),
        concat_padding_mask=False,  # torchvision resizes it, before anything is split
        extra_pos_embed_type="learnable" if learned else None,
        controlnet_block_every_n=2 if control else None,
        use_crossattn_projection=image,
        crossattn_proj_in_channels=8,
        encoder_hidden_states_channels=64,
        img_context_dim_in=6 if image else None,
        img_context_dim_out=64,
    )


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    per_frame: bool = False,
    image: bool = False,
    control: bool = False,
    masked: bool = False,
    **_: Any,
) -> dict[str, Any]:
    words = torch.randn(batch, text, 8)
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "timestep": torch.rand(batch, 1, frames, 1, 1) if per_frame else torch.rand(batch),
        "encoder_hidden_states": (words, torch.randn(batch, 5, 6)) if image else words,
        "block_controlnet_hidden_states": [torch.randn(batch, frames * side * side, 64)] if control else None,
        "attention_mask": text_mask(batch, text).bool() if masked else None,
        "fps": 16,
    }


FAMILIES = {
    "cosmos": Family(
        build,
        inputs,
        [
            {},  # 1.0
            {"learned": False, "per_frame": True},  # 2
            {"learned": False, "per_frame": True, "image": True, "control": True},  # 2.5, with a ControlNet
        ],
    )
}
