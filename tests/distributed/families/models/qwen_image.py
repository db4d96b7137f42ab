"""Tiny Qwen-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from tests.distributed.families.harness import Family


def build(edits: bool = False, layered: bool = False, **_: Any) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=1,
        num_layers=2,
        attention_head_dim=32,  # on a CPU the product of fewer complex numbers is rounded in another way
        num_attention_heads=4,
        joint_attention_dim=8,
        axes_dims_rope=(16, 8, 8),
        zero_cond_t=edits,
        use_layer3d_rope=layered,
        use_additional_t_cond=layered,
    )


def inputs(
    batch: int = 2,
    text: int = 7,
    frames: int = 3,
    side: int = 3,
    layered: bool = False,
    masked: bool = True,
    controlled: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """An image and references of the same size, or the layers of one."""
    tokens = frames * side * side
    mask = torch.rand(batch, text) > 0.4
    mask[:, 0] = True
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 8),
        "encoder_hidden_states_mask": mask.long() if masked else None,
        "timestep": torch.rand(batch),
        "img_shapes": [[(1, side, side)] * frames] * batch,
        "additional_t_cond": torch.arange(batch) % 2 if layered else None,
        "controlnet_block_samples": [torch.randn(batch, tokens, 128) for _ in range(controlled)] or None,
    }


FAMILIES = {
    "qwen_image": Family(build, inputs, [{"edits": True}, {"controlled": 1}, {"layered": True, "masked": False}]),
}
