"""Tiny HunyuanVideo, Framepack and HunyuanVideo-1.5."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoTransformer3DModel,
)
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15ByT5TextProjection
from torch import Tensor

from tests.distributed.families.harness import Family

SIZES: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 8,
    "rope_axes_dim": (4, 2, 2),
}


def text_mask(batch: int, text: int) -> Tensor:
    mask = torch.ones(batch, text, dtype=torch.int64)
    if text > 1:
        mask[0, -(text // 2) :] = 0
    return mask


def build(condition: str | None = None, **_: Any) -> HunyuanVideoTransformer3DModel:
    return HunyuanVideoTransformer3DModel(
        **SIZES,
        num_single_layers=2,
        patch_size=1,
        pooled_projection_dim=8,
        guidance_embeds=condition is None,
        image_condition_type=condition,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, condition: str | None = None, **_: Any
) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "encoder_attention_mask": text_mask(batch, text),
        "pooled_projections": torch.randn(batch, 8),
        "guidance": torch.full((batch,), 6000.0) if condition is None else None,
    }


def build_framepack(singles: int = 2, **_: Any) -> HunyuanVideoFramepackTransformer3DModel:
    return HunyuanVideoFramepackTransformer3DModel(
        **SIZES,
        num_single_layers=singles,
        patch_size=2,
        pooled_projection_dim=8,
        has_image_proj=True,
        image_proj_dim=6,
        has_clean_x_embedder=True,
    )


def framepack_inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, image: int = 3, **_: Any
) -> dict[str, Any]:
    """The history has a frame as it is, 2 at half and 5 at a quarter of the sides, which do not divide evenly."""
    history = torch.randn(batch, 4, 8 + frames, 2 * side, 2 * side).split([5, 2, 1, frames], dim=2)
    indices = torch.arange(8 + frames).split([5, 2, 1, frames])
    parts = ("latents_history_4x", "latents_history_2x", "latents_clean", "latents")
    return {
        **dict(zip((*parts[:3], "hidden_states"), history, strict=True)),
        **{f"indices_{part}": numbers for part, numbers in zip(parts, indices, strict=True)},
        "timestep": torch.randint(0, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "encoder_attention_mask": text_mask(batch, text),
        "pooled_projections": torch.randn(batch, 8),
        "image_embeds": torch.randn(batch, image, 6),
        "guidance": torch.full((batch,), 6000.0),
    }


def build_15(flow: str = "", **_: Any) -> HunyuanVideo15Transformer3DModel:
    sizes = SIZES | {"num_layers": 2}
    model = HunyuanVideo15Transformer3DModel(
        **sizes, patch_size=1, text_embed_2_dim=6, image_embed_dim=10, use_meanflow=flow == "mean"
    )
    model.context_embedder_2 = HunyuanVideo15ByT5TextProjection(6, 16, 32)  # it is 2048 wide in models of any size
    return model


def inputs_15(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, flow: str = "", image: bool = False, **_: Any
) -> dict[str, Any]:
    """Text of so many tokens in all."""
    second, pictures = text // 3, text // 4
    first = text - second - pictures
    mask_2 = torch.ones(batch, second, dtype=torch.int64)
    mask_2[-1] = 0
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side),
        "timestep": 1000 * torch.rand(batch),
        "timestep_r": 1000 * torch.rand(batch) if flow else None,
        "encoder_hidden_states": torch.randn(batch, first, 8),
        "encoder_attention_mask": text_mask(batch, first),
        "encoder_hidden_states_2": torch.randn(batch, second, 6),
        "encoder_attention_mask_2": mask_2,
        "image_embeds": torch.randn(batch, pictures, 10) * image,
    }


FAMILIES = {
    "hunyuan_video": Family(
        build, inputs, [{"condition": condition} for condition in (None, "latent_concat", "token_replace")]
    ),
    # 30 tokens of an image and 8 of text are as many as video and history of a frame of 4 x 4 tokens
    "hunyuan_video_framepack": Family(build_framepack, framepack_inputs, [{}, {"image": 30}, {"singles": 0}]),
    "hunyuan_video_15": Family(build_15, inputs_15, [{}, {"image": True}, {"flow": "mean", "image": True}]),
}
