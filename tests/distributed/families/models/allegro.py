"""Tiny Allegro."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AllegroTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from tests.distributed.families.harness import Family
from tests.distributed.families.models.hunyuan_video import text_mask


def build(**_: Any) -> AllegroTransformer3DModel:
    return AllegroTransformer3DModel(
        patch_size=1,
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        sample_height=4,
        sample_width=4,
        sample_frames=4,
        caption_channels=8,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, rotary: bool = True, **_: Any
) -> dict[str, Any]:
    *tables, t, h, w = get_3d_rotary_pos_embed_allegro(12, ((0, 0), (side, side)), (side, side), frames)
    positions = torch.cartesian_prod(t.long(), h.long(), w.long()).T[:, None]
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_attention_mask": text_mask(batch, text),
        "image_rotary_emb": (tuple(tables), tuple(positions)) if rotary else None,
    }


FAMILIES = {"allegro": Family(build, inputs, [{}, {"rotary": False}], spread=0.1)}
