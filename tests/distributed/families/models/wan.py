"""Tiny models of Wan and its kin."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)

from tests.distributed.families.harness import Family

SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
FACES = {"4": 8, "8": 4}  # channels of the motion encoder by the side of its picture


def config(image: bool = False, frames_of_image: int = 1, head_dim: int = 12, **_: Any) -> dict[str, Any]:
    embedded = {"pos_embed_seq_len": 6} if frames_of_image == 2 else {}
    of_image = {"image_dim": 8, "added_kv_proj_dim": 4 * head_dim}
    return SIZES | {"attention_head_dim": head_dim} | (of_image | embedded if image else {})


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    image: bool = False,
    frames_of_image: int = 1,
    timesteps: str = "sample",
    **_: Any,
) -> dict[str, Any]:
    """With an image, the cross-attention takes the last 512 tokens for text, and ``text`` counts its own."""
    shape = {
        "sample": (batch,),
        "column": (batch, 1),
        "frame": (batch, frames),
        "token": (batch, frames * side**2),
    }[timesteps]
    given = {
        "hidden_states": torch.randn(batch, 4, frames, 2 * side, 2 * side),
        "timestep": torch.randint(0, 1000, shape),
        "encoder_hidden_states": torch.randn(batch, 512 if image else text, 8),
    }
    if image:
        tokens = 3 if frames_of_image == 2 else text
        given["encoder_hidden_states_image"] = torch.randn(batch * frames_of_image, tokens, 8)
    return given


def wan(cross_attn_norm: bool = True, **settings: Any) -> WanTransformer3DModel:
    return WanTransformer3DModel(**config(**settings), cross_attn_norm=cross_attn_norm)


def vace(**settings: Any) -> WanVACETransformer3DModel:
    return WanVACETransformer3DModel(**config(**settings), vace_layers=[0, 1], vace_in_channels=6)


def vace_inputs(scales: bool = False, shorter: bool = False, **settings: Any) -> dict[str, Any]:
    given = inputs(**settings)
    batch, _, frames, height, width = given["hidden_states"].shape
    control = torch.randn(batch, 6, max(1, frames - 1) if shorter else frames, height, width)
    scale = {"control_hidden_states_scale": torch.tensor([0.5, 1.5])} if scales else {}
    return given | {"control_hidden_states": control} | scale


def chronoedit(**settings: Any) -> ChronoEditTransformer3DModel:
    return ChronoEditTransformer3DModel(**config(**settings), rope_temporal_skip_len=4)


def skyreels(fps: bool = False, **settings: Any) -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(**config(**settings), inject_sample_info=fps)


def skyreels_inputs(fps: bool = False, timesteps: str = "sample", **settings: Any) -> dict[str, Any]:
    if fps and timesteps == "frame":
        settings["batch"] = 1  # as diffusers' broadcasting of frame rates takes for granted
    given = inputs(timesteps=timesteps, **settings)
    rates = {"fps": [i % 2 for i in range(given["hidden_states"].shape[0])]} if fps else {}
    return given | {"enable_diffusion_forcing": timesteps == "frame"} | rates


def animate(**settings: Any) -> WanAnimateTransformer3DModel:
    settings = config(**settings) | {"in_channels": 12, "num_layers": 3}
    return WanAnimateTransformer3DModel(
        **{"image_dim": None} | settings,
        latent_channels=4,
        motion_encoder_channel_sizes=FACES,
        motion_encoder_size=8,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=1,
        motion_encoder_batch_size=2,
    )


def animate_inputs(frames: int = 3, **settings: Any) -> dict[str, Any]:
    """One frame is that of the character, the others follow its pose, and four faces make one of them."""
    frames = max(2, frames)
    given = inputs(frames=frames, **settings)
    batch, _, _, height, width = given["hidden_states"].shape
    return given | {
        "hidden_states": torch.randn(batch, 12, frames, height, width),
        "pose_hidden_states": torch.randn(batch, 4, frames - 1, height, width),
        "face_pixel_values": torch.randn(batch, 3, 4 * (frames - 1) - 3, 8, 8),
    }


IMAGES: list[dict[str, Any]] = [{"image": True}, {"image": True, "frames_of_image": 2}]
FORCING: list[dict[str, Any]] = [{"timesteps": "frame"}, {"timesteps": "frame", "frames": 9, "side": 1}]

FAMILIES = {
    "wan": Family(wan, inputs, [{}, {"timesteps": "token"}, {"cross_attn_norm": False}, *IMAGES]),
    "wan_vace": Family(vace, vace_inputs, [{}, {"scales": True, "shorter": True}, {"image": True}]),
    "chronoedit": Family(chronoedit, inputs, [{}, {"frames": 2}, {"timesteps": "token"}, {"image": True}]),
    "skyreels_v2": Family(
        skyreels,
        skyreels_inputs,
        [{}, *FORCING, {"fps": True}, {"fps": True, "timesteps": "frame"}, {"image": True}],
    ),
    "wan_animate": Family(animate, animate_inputs, [{}, *IMAGES]),
}
