"""Tiny Kandinsky 5."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Kandinsky5Transformer3DModel

from tests.distributed.families.harness import Family


def build(condition: bool = False, **_: Any) -> Kandinsky5Transformer3DModel:
    return Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=8,
        in_text_dim2=6,
        time_dim=16,
        out_visual_dim=4,
        patch_size=(1, 1, 1),
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 2, 2),
        visual_cond=condition,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, condition: bool = False, **_: Any
) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, frames, side, side, 9 if condition else 4),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": 1000 * torch.rand(batch),
        "pooled_projections": torch.randn(batch, 6),
        "visual_rope_pos": [torch.arange(n) for n in (frames, side, side)],
        "text_rope_pos": torch.arange(text),
        "scale_factor": (1.0, 2.0, 2.0),
    }


FAMILIES = {"kandinsky": Family(build, inputs, [{}, {"condition": True}], spread=0.15)}
