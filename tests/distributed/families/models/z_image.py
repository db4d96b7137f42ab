"""Tiny Z-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import TimestepEmbedder
from torch import Tensor

from tests.distributed.families.harness import Family

WIDTH = 4 * 32  # on a CPU the product of fewer complex numbers than heads of 32 have is rounded in another way


def build(omni: bool = False, refiners: int = 1, **_: Any) -> ZImageTransformer2DModel:
    model = ZImageTransformer2DModel(
        in_channels=4,
        dim=WIDTH,
        n_layers=2,
        n_refiner_layers=refiners,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=8,
        siglip_feat_dim=6 if omni else None,
        axes_dims=[16, 8, 8],
        axes_lens=[1024, 64, 64],
    )
    model.t_embedder = TimestepEmbedder(WIDTH, 8, 8)  # it is 1024 wide in models of any size, and modulation as large
    return model


def image(frames: int, side: int, taller: int) -> Tensor:
    """Frames are squares in a row."""
    return torch.randn(4, 1, 2 * (side + taller), 2 * side * frames)


def padded(tokens: int) -> int:
    return -(-tokens // 32) * 32


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    omni: bool = False,
    controlled: bool = False,
    **_: Any,
) -> dict[str, Any]:
    """Every other sample is taller by twelve rows of tokens, and its caption 40 tokens longer."""
    tall = [12 * (sample % 2) for sample in range(batch)]
    captions = [torch.randn(text + 40 * (sample % 2), 8) for sample in range(batch)]
    given = {"t": torch.rand(batch)}
    if not omni:
        given |= {"x": [image(frames, side, more) for more in tall], "cap_feats": captions}
        if controlled:
            lengths = [
                padded((side + more) * side * frames) + padded(len(caption))
                for more, caption in zip(tall, captions, strict=True)
            ]
            given["controlnet_block_samples"] = {1: torch.randn(batch, max(lengths), WIDTH)}
        return given
    return given | {
        "x": [[image(1, 2, 0), image(frames, side, more)] for more in tall],
        "cap_feats": [[torch.randn(5, 8), caption] for caption in captions],
        "siglip_feats": [[torch.randn(2, 3, 6), None] for _ in tall],
        "image_noise_mask": [[0, 1] for _ in tall],
    }


FAMILIES = {"z_image": Family(build, inputs, [{"controlled": True}, {"omni": True}, {"refiners": 0}])}
