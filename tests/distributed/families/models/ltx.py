"""Tiny LTX-Video and LTX-2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel, LTXVideoTransformer3DModel
from torch import Tensor

from tests.distributed.families.harness import Family

_SIZES: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "num_layers": 2}


def _timesteps(kind: str, batch: int, tokens: int) -> Tensor:
    shape = {"sample": (batch,), "column": (batch, 1), "token": (batch, tokens)}[kind]
    return torch.randint(0, 1000, shape)


def _text_mask(batch: int, text: int) -> Tensor:
    mask = torch.ones(batch, text)
    if text > 1:
        mask[0, -(text // 2) :] = 0
    return mask


def build_ltx(**_: Any) -> LTXVideoTransformer3DModel:
    return LTXVideoTransformer3DModel(**_SIZES, attention_head_dim=8, cross_attention_dim=32, caption_channels=8)


def ltx_inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    times: str = "sample",
    coordinates: bool = False,
    **_: Any,
) -> dict[str, Any]:
    tokens = frames * side * side
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": _timesteps(times, batch, tokens),
        "encoder_attention_mask": _text_mask(batch, text),
        "num_frames": frames,
        "height": side,
        "width": side,
        "rope_interpolation_scale": None if coordinates else (8 / 25, 32, 32),
        "video_coords": torch.rand(batch, 3, tokens) * 20 if coordinates else None,
    }


def build_ltx2(
    version: str = "2.0", rope: str = "interleaved", head_dim: int = 8, **_: Any
) -> LTX2VideoTransformer3DModel:
    later: dict[str, Any] = {}
    if version != "2.0":
        later = {
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
        }
    if version == "2.5":
        later |= {"ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True}
    return LTX2VideoTransformer3DModel(
        **_SIZES,
        attention_head_dim=head_dim,
        cross_attention_dim=4 * head_dim,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=4,
        audio_attention_head_dim=head_dim // 2,
        audio_cross_attention_dim=2 * head_dim,
        caption_channels=8,
        rope_type=rope,
        **later,
    )


def ltx2_inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    version: str = "2.0",
    times: str = "sample",
    audio_times: str | None = "sample",
    audio: int | None = 5,
    isolated: bool = False,
    head_dim: int = 8,
    **_: Any,
) -> dict[str, Any]:
    tokens = frames * side * side
    audio = audio or tokens
    widths = (8, 8) if version == "2.0" else (4 * head_dim, 2 * head_dim)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(batch, tokens, 4),
        "audio_hidden_states": torch.randn(batch, audio, 4),
        "encoder_hidden_states": torch.randn(batch, text, widths[0]),
        "audio_encoder_hidden_states": torch.randn(batch, text, widths[1]),
        "timestep": _timesteps(times, batch, tokens),
        "audio_timestep": None if audio_times is None else _timesteps(audio_times, batch, audio),
        "encoder_attention_mask": _text_mask(batch, text),
        "audio_encoder_attention_mask": _text_mask(batch, text),
        "num_frames": frames,
        "height": side,
        "width": side,
        "audio_num_frames": audio,
        "isolate_modalities": isolated,
    }
    if version != "2.0":
        inputs |= {"sigma": torch.rand(batch) * 1000, "audio_sigma": torch.rand(batch) * 1000}
        inputs |= {"use_cross_timestep": True}
    if version == "2.5":
        inputs["video_keyframes_mask"] = torch.arange(tokens).lt(side * side)[None, :, None].expand(batch, -1, -1)
    return inputs


FAMILIES = {
    "ltx": Family(
        build_ltx,
        ltx_inputs,
        [{"times": "sample"}, {"times": "column"}, {"times": "token", "coordinates": True}],
    ),
    "ltx2": Family(
        build_ltx2,
        ltx2_inputs,
        [
            {"audio_times": None},
            {"rope": "split", "times": "token"},
            {"version": "2.3", "rope": "split", "times": "token", "audio_times": "token"},
            {"version": "2.5", "times": "column", "audio_times": "token", "audio": None},
        ],
    ),
}
