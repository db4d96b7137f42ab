"""Stable Diffusion 3 and 3.5 as diffusers has them (`SD3Transformer2DModel`): their sizes and split plan.

Text and image are streams of their own and attend together, image first. In some blocks of 3.5-medium the image also
attends to itself. The last block makes nothing of its text but keys and values. Positions are added to the patches in
front of the blocks, cropped from a larger table; what a ControlNet adds between blocks is of the image's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan
from lightning_videoscale.parallel.plan import matching_modules

_MODEL = "diffusers.models.transformers.transformer_sd3.SD3Transformer2DModel"

GEOMETRIES = {"sd3": ModelGeometry(temporal_stride=1, text_tokens=77 + 256)}  # images alone; text of CLIP and of T5


def _sizes(layers: int, width: int, dual: int) -> TransformerFlops:
    """Blocks that attend twice count as two layers, among which the MLPs of all are shared out."""
    attentions = layers + dual
    return TransformerFlops(attentions, width, round(4 * width * layers / attentions), cross_attention=False)


# Layers as in diffusers' scripts/convert_sd3_to_diffusers.py, which has as many heads of 64 channels.
TRANSFORMERS = {
    "sd3-medium": _sizes(24, 1536, 0),
    "sd3.5-medium": _sizes(24, 1536, 13),
    "sd3.5-large": _sizes(38, 2432, 0),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _sizes(config["num_layers"], width, len(config["dual_attention_layers"]))


FLOPS = {_MODEL: _flops}

BLOCKS = {_MODEL: ("transformer_blocks.*",)}

_JOINT, _OWN = "transformer_blocks.*.attn", "transformer_blocks.*.attn2"


def _split_plan(model: nn.Module) -> SplitPlan:
    attention = {_JOINT: Attention(("video", "text"))}
    if matching_modules(model, _OWN):
        attention[_OWN] = Attention()
    return SplitPlan(
        inputs={"": {"encoder_hidden_states": Split(1, ("text",)), "block_controlnet_hidden_states": Split(1)}},
        outputs={"pos_embed": {0: Split(1)}},  # not the first block's inputs, which a call may leave out
        gathers={"proj_out": {0: Split(1)}},
        attention=attention,
    )


SPLIT_PLANS = {_MODEL: _split_plan}

_TEXT = Projection(
    "encoder_hidden_states", ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")
)
_PROJECTIONS = {_JOINT: {"video": Projection(), "text": _TEXT}, _OWN: {"video": Projection()}}

PROJECTIONS = {_MODEL: lambda _: _PROJECTIONS}
