"""Tiny CogVideoX and ConsisID."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel

from tests.distributed.families.harness import Family

_FACE_TOKENS = 6


def _sizes(text: int, frames: int, side: int, learned: bool, rotary: bool) -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 8,
        "sample_width": side,
        "sample_height": side,
        "sample_frames": 4 * frames - 3,
        "patch_size": 1,
        "max_text_seq_length": text,
        "use_rotary_positional_embeddings": rotary,
        "use_learned_positional_embeddings": learned,
    }


def build(
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    rotary: bool = True,
    learned: bool = False,
    patch_frames: int | None = None,
    offset: bool = False,
    **_: Any,
) -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(
        **_sizes(text, frames, side, learned, rotary),
        num_layers=2,
        patch_size_t=patch_frames,
        ofs_embed_dim=8 if offset else None,
        patch_bias=patch_frames is None,
    )


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    rotary: bool = True,
    patch_frames: int | None = None,
    offset: bool = False,
    **_: Any,
) -> dict[str, Any]:
    angles = torch.randn(frames * side * side, 4).repeat_interleave(2, 1)
    given = {
        "hidden_states": torch.randn(batch, frames * (patch_frames or 1), 4, side, side),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.randint(0, 1000, (batch,)),
        "image_rotary_emb": (angles.cos(), angles.sin()) if rotary else None,
    }
    return given | ({"ofs": torch.full((1,), 2.0)} if offset else {})


def build_consisid(
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    face: bool = True,
    interval: int = 2,
    learned: bool = True,
    **_: Any,
) -> ConsisIDTransformer3DModel:
    return ConsisIDTransformer3DModel(
        **_sizes(text, frames, side, learned, rotary=True),
        num_layers=2,
        is_train_face=face,
        cross_attn_interval=interval,
        cross_attn_dim_head=4,
        cross_attn_num_heads=2,
        LFE_id_dim=8,
        LFE_vit_dim=8,
        LFE_depth=2,
        LFE_dim_head=4,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=_FACE_TOKENS,
        LFE_output_dim=21,
        LFE_ff_mult=1,
        LFE_num_scale=2,
    )


def consisid_inputs(batch: int = 2, face: bool = True, **settings: Any) -> dict[str, Any]:
    given = inputs(batch, **settings)
    if face:
        given |= {"id_cond": torch.randn(batch, 8), "id_vit_hidden": [torch.randn(batch, 5, 8) for _ in range(2)]}
    return given


FAMILIES = {
    "cogvideox": Family(
        build,
        inputs,
        [
            {"rotary": False},  # 1.0, 2B
            {},  # 1.0, 5B
            {"learned": True},  # 1.0, I2V
            {"patch_frames": 2},  # 1.5
            {"patch_frames": 2, "offset": True},  # 1.5, I2V
        ],
    ),
    "consisid": Family(build_consisid, consisid_inputs, [{}, {"interval": 1}, {"face": False}]),
}
