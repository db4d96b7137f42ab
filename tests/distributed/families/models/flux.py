"""Tiny Flux."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from tests.distributed.families.harness import Family

SIZES: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 8,
}


def build(guidance: bool = False, singles: int = 2, **_: Any) -> FluxTransformer2DModel:
    sizes = SIZES | {"num_single_layers": singles}
    return FluxTransformer2DModel(**sizes, pooled_projection_dim=6, guidance_embeds=guidance, axes_dims_rope=(4, 2, 2))


def positions(frames: int, side: int) -> Tensor:
    """(S, 3) of an image, or of several with a number each, as of Kontext's references."""
    cells = torch.cartesian_prod(torch.arange(frames), torch.arange(side), torch.arange(side))
    return cells.float()


def tokens(batch: int, text: int, frames: int, side: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, frames * side * side, 4),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.rand(batch),
        "img_ids": positions(frames, side),
        "txt_ids": torch.zeros(text, 3),
    }


def control(batch: int, frames: int, side: int, count: int) -> list[Tensor]:
    return [torch.randn(batch, frames * side * side, 32) for _ in range(count)]


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    guidance: bool = False,
    controlled: tuple[int, int] | None = None,
    batched_ids: bool = False,
    **_: Any,
) -> dict[str, Any]:
    given = tokens(batch, text, frames, side) | {
        "pooled_projections": torch.randn(batch, 6),
        "guidance": torch.full((batch,), 3.5) if guidance else None,
    }
    if batched_ids:
        given |= {name: given[name].expand(batch, -1, -1) for name in ("img_ids", "txt_ids")}
    if controlled is not None:
        names = ("controlnet_block_samples", "controlnet_single_block_samples")
        given |= {name: control(batch, frames, side, count) for name, count in zip(names, controlled, strict=True)}
    return given


FAMILIES = {
    "flux": Family(
        build,
        inputs,
        [{"controlled": (2, 1)}, {"guidance": True, "batched_ids": True}, {"singles": 0}],
    ),
}
