"""Tiny Flux.2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2Transformer2DModel

from tests.distributed.families.harness import Family
from tests.distributed.families.models.flux import SIZES, tokens


def build(guidance: bool = True, **_: Any) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        **SIZES, timestep_guidance_channels=8, mlp_ratio=2.0, axes_dims_rope=(2, 2, 2, 2), guidance_embeds=guidance
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, guidance: bool = True, **_: Any
) -> dict[str, Any]:
    """Positions of an image have no fourth number but zero, those of text nothing else."""
    given = tokens(batch, text, frames, side)
    image = torch.nn.functional.pad(given["img_ids"], (0, 1))
    words = torch.nn.functional.pad(torch.arange(text)[:, None].float(), (3, 0))
    ids = {"img_ids": image, "txt_ids": words}
    if guidance:
        ids = {name: x.expand(batch, -1, -1) for name, x in ids.items()}
    return given | ids | {"guidance": torch.full((batch,), 3.5) if guidance else None}


# With larger weights, rounding to bfloat16 changes the gradients of one batch in thirty by a tenth.
FAMILIES = {"flux2": Family(build, inputs, [{}, {"guidance": False}], spread=0.2)}
