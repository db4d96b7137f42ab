"""Tiny PixArt."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import PixArtTransformer2DModel

from tests.distributed.families.harness import Family
from tests.distributed.families.models.hunyuan_video import text_mask


def build(sizes: bool = False, **_: Any) -> PixArtTransformer2DModel:
    return PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        sample_size=128 if sizes else 8,
        patch_size=1,
        caption_channels=8,
        use_additional_conditions=sizes,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, sizes: bool = False, **_: Any
) -> dict[str, Any]:
    conditions = {"resolution": torch.rand(batch, 2) * 512, "aspect_ratio": torch.rand(batch, 1)}
    return {
        "hidden_states": torch.randn(batch, 4, frames * side, side),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.randint(0, 1000, (batch,)),
        "added_cond_kwargs": conditions if sizes else {"resolution": None, "aspect_ratio": None},
        "encoder_attention_mask": text_mask(batch, text),
    }


FAMILIES = {"pixart": Family(build, inputs, [{}, {"sizes": True}], spread=0.12)}
