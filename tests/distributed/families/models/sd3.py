"""Tiny Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import TimestepEmbedding, Timesteps

from tests.distributed.families.harness import Family

HEADS, HEAD_DIM = 4, 8
WIDTH = HEADS * HEAD_DIM


def build(
    dual: tuple[int, ...] = (), norm: str | None = None, frames: int = 3, side: int = 3, **_: Any
) -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(
        sample_size=2,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=8,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=6,
        pos_embed_max_size=frames * side + 1,
        dual_attention_layers=dual,
        qk_norm=norm,
    )
    embed = model.time_text_embed  # of 256 channels in models of any size, and modulation as large
    embed.time_proj, embed.timestep_embedder = Timesteps(8, True, 0), TimestepEmbedding(8, WIDTH)
    return model


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    controlled: int = 0,
    skipped: list[int] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """A picture of so many squares in a row."""
    given = {
        "hidden_states": torch.randn(batch, 4, side, frames * side),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "pooled_projections": torch.randn(batch, 6),
        "timestep": torch.randint(0, 1000, (batch,)),
        "skip_layers": skipped,
    }
    if controlled:
        residuals = [torch.randn(batch, frames * side * side, WIDTH) for _ in range(controlled)]
        given["block_controlnet_hidden_states"] = residuals
    return given


# Without a norm of queries and keys, as 3.0 has them, float32 rounds gradients by more than 1e-5 on one device already.
FAMILIES = {
    "sd3": Family(
        build,
        inputs,
        [{"dual": (0, 2), "norm": "rms_norm"}, {"norm": "rms_norm", "controlled": 2}],
    ),
}
