"""Tiny Chroma."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ChromaTransformer2DModel

from tests.distributed.families.harness import Family
from tests.distributed.families.models.flux import SIZES, control, tokens
from tests.distributed.families.models.hunyuan_video import text_mask


def build(**_: Any) -> ChromaTransformer2DModel:
    return ChromaTransformer2DModel(
        **SIZES,
        axes_dims_rope=(4, 2, 2),
        approximator_num_channels=8,
        approximator_hidden_dim=8,
        approximator_layers=1,
    )


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    masked: bool = True,
    controlled: bool = False,
    **_: Any,
) -> dict[str, Any]:
    given = tokens(batch, text, frames, side)
    if masked:
        image = torch.ones(batch, frames * side * side, dtype=torch.bool)
        given["attention_mask"] = torch.cat([text_mask(batch, text).bool(), image], dim=1)
    if controlled:
        given["controlnet_block_samples"] = control(batch, frames, side, 1)
        given["controlnet_single_block_samples"] = control(batch, frames, side, 2)
    return given


FAMILIES = {"chroma": Family(build, inputs, [{}, {"masked": False, "controlled": True}])}
