"""Tiny EasyAnimate."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import EasyAnimateTransformer3DModel

from tests.distributed.families.harness import Family


def build(own: int = 2, second: bool = False, **_: Any) -> EasyAnimateTransformer3DModel:
    return EasyAnimateTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=8 if second else 4,
        out_channels=4,
        patch_size=1,
        num_layers=2,
        mmdit_layers=own,
        time_embed_dim=8,
        text_embed_dim=8,
        text_embed_dim_t5=6 if second else None,
        after_norm=second,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, second: bool = False, **_: Any
) -> dict[str, Any]:
    """With a second text, what is to be painted in, too."""
    video = (batch, 4, frames, side, side)
    more = {"encoder_hidden_states_t5": torch.randn(batch, 3, 6), "inpaint_latents": torch.randn(video)}
    return {
        "hidden_states": torch.randn(video),
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        **(more if second else {}),
    }


FAMILIES = {"easyanimate": Family(build, inputs, [{}, {"own": 1}, {"own": 0}, {"second": True}])}
