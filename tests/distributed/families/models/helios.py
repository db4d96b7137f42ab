"""Tiny Helios."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import HeliosTransformer3DModel

from tests.distributed.families.harness import Family


def build(guided: bool = True, zero: bool = True, amplified: str | None = None, **_: Any) -> HeliosTransformer3DModel:
    return HeliosTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=48,
        num_layers=2,
        rope_dim=(4, 2, 2),
        guidance_cross_attn=guided,
        zero_history_timestep=zero,
        is_amplify_history=amplified is not None,
        history_scale_mode=amplified or "per_head",
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, history: tuple[int, ...] = (1, 2, 4), **_: Any
) -> dict[str, Any]:
    """The history has frames as they are, at half and at a quarter of the sides, which do not divide evenly."""
    given: dict[str, Any] = {
        "hidden_states": torch.randn(batch, 4, frames, 2 * side, 2 * side),
        "timestep": torch.randint(1, 1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, text, 8),
    }
    numbers = torch.arange(sum(history) + frames).expand(batch, -1)
    *past, now = numbers.split([*history, frames], dim=1)
    for name, part in zip(("short", "mid", "long"), past, strict=False):
        given[f"latents_history_{name}"] = torch.randn(batch, 4, part.shape[1], 2 * side, 2 * side)
        given[f"indices_latents_history_{name}"] = part
    return given | {"indices_hidden_states": now}


FAMILIES = {
    "helios": Family(
        build,
        inputs,
        [
            {},
            {"history": (), "amplified": "per_head"},
            {"guided": False, "amplified": "scalar"},
            {"zero": False, "amplified": "per_head", "history": (1,)},
        ],
    )
}
