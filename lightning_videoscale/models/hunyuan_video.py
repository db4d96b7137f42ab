"""HunyuanVideo as diffusers has it (`HunyuanVideoTransformer3DModel`): its sizes and its split plan.

Text and video are streams of their own in the first blocks and attend together, video first; in the later ones they are
one sequence while a block runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.parallel import Attention, Count, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoTransformer3DModel"

GEOMETRIES = {"hunyuanvideo": ModelGeometry(text_tokens=256)}  # text as long as its pipeline's default
TRANSFORMERS = {"hunyuanvideo": TransformerFlops(60, 3072, 12288, cross_attention=False)}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    layers = config["num_layers"] + config["num_single_layers"]
    return TransformerFlops(layers, width, int(width * config["mlp_ratio"]), cross_attention=False)


FLOPS = {_MODEL: _flops}

BLOCKS = {_MODEL: ("transformer_blocks.*", "single_transformer_blocks.*")}


def _split_plan(model: nn.Module) -> SplitPlan:
    text, joint = Split(1, ("text",)), ("video", "text")
    lists = [
        name for name in ("transformer_blocks", "single_transformer_blocks") if [*model.get_submodule(name).children()]
    ]
    block: dict[str, Split | Count] = {"attention_mask": Split(3, joint)}
    if model.config["image_condition_type"] == "token_replace":  # type: ignore[index]
        block["num_tokens"] = Count()
    return SplitPlan(
        inputs={
            f"{lists[0]}.0": {"hidden_states": Split(1), "encoder_hidden_states": text},
            **{f"{name}.*": block for name in lists},
        },
        outputs={"rope": {0: Split(0), 1: Split(0)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={f"{name}.*.attn": Attention(joint) for name in lists},
    )


SPLIT_PLANS = {_MODEL: _split_plan}
