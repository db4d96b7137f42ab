"""Tiny MiniMax-H3."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from tests.distributed.families.harness import Family


def build(rotated: int = 1, **_: Any) -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=48,
        in_channels=4,
        audio_in_channels=3,
        patch_size=(1, 1, 1),
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=rotated,
    )


def inputs(
    batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, audio: int = 5, given: int = 0, **_: Any
) -> dict[str, Any]:
    """Rows of all kinds lie mixed; of the video, so many are given and have a timestep of their own."""
    video = frames * side * side
    order = torch.randperm(video + audio + text)
    of_video, of_audio, of_text = order.split([video, audio, text])
    tags, times = torch.zeros_like(order), torch.zeros_like(order)
    tags[of_text], tags[of_audio] = 1, 2
    times[of_video[:given]], times[of_audio] = 1, 2
    return {
        "hidden_states": torch.randn(batch, video, 4),
        "audio_hidden_states": torch.randn(batch, audio, 3),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "timestep": torch.rand(3),
        "timestep_indices": times,
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (len(order), 3)),
        "video_indices": of_video,
        "audio_indices": of_audio,
        "text_indices": of_text,
    }


FAMILIES = {"minimax_h3": Family(build, inputs, [{}, {"rotated": 2, "given": 4}])}
