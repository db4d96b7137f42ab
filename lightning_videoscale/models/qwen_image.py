"""Qwen-Image as diffusers has it (`QwenImageTransformer2DModel`): its sizes and split plan.

Text and image are streams of their own and attend together, text first; each has rotary tables, complex ones. Models
for editing modulate the tokens of reference images as at time zero, by an index of each token of the image. What a
ControlNet adds between blocks is of the image's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.compat.diffusers import joins_text_masks
from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_MODEL = "diffusers.models.transformers.transformer_qwenimage.QwenImageTransformer2DModel"

# Of text its pipelines take 512 tokens at most, and pad to the longest of a batch only.
GEOMETRIES = {"qwen-image": ModelGeometry(text_tokens=512)}
TRANSFORMERS = {"qwen-image": TransformerFlops(60, 3072, 12288, cross_attention=False)}  # the class's defaults


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return TransformerFlops(config["num_layers"], width, 4 * width, cross_attention=False)


FLOPS = {_MODEL: _flops}

BLOCKS = {_MODEL: ("transformer_blocks.*",)}

_JOINT, _TEXT = ("text", "video"), ("text",)


def _split_plan(model: nn.Module) -> SplitPlan:
    inputs: dict[str, Mapping[str, Rule]] = {
        "": {"controlnet_block_samples": Split(1)},
        "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1, _TEXT)},
        "transformer_blocks.*": {"encoder_hidden_states_mask": Split(1, _TEXT), "modulate_index": Split(1)},
    }
    if joins_text_masks(model):
        inputs["transformer_blocks.*.attn"] = {"attention_mask": Split(1, _JOINT)}
    return SplitPlan(
        inputs=inputs,
        outputs={"pos_embed": {0: Split(0), 1: Split(0, _TEXT)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn": Attention(_JOINT)},
    )


SPLIT_PLANS = {_MODEL: _split_plan}

_STREAMS = {
    "text": Projection(
        "encoder_hidden_states",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        ("norm_added_q", "norm_added_k"),
        rotary="image_rotary_emb",
        rotary_part=1,
        layout="complex",
    ),
    "video": Projection(rotary="image_rotary_emb", rotary_part=0, layout="complex"),
}

PROJECTIONS = {_MODEL: lambda _: {"transformer_blocks.*.attn": _STREAMS}}
