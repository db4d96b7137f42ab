"""The split plans and the sizes of HunyuanVideo, its Framepack and HunyuanVideo-1.5.

Text and video are streams of their own in the first blocks and attend together, video first; in the later ones they are
one sequence while a block runs. Token by token, both kinds of blocks cost the same.

Framepack puts the tokens of its history in front of the video, with a rotary table made of several, and takes the video
out again behind the last block: hence its tables are split where blocks receive them, and that block's output gathered.

HunyuanVideo-1.5 has no later blocks. Its text is an image's tokens and those of two encoders, sorted so that padding
comes last, and it masks rows of padding, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import OF_ADDED
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Count, Projection, Split, SplitPlan

_DIFFUSERS = "diffusers.models.transformers.transformer_hunyuan_video"
_MODEL = f"{_DIFFUSERS}.HunyuanVideoTransformer3DModel"
_FRAMEPACK = f"{_DIFFUSERS}_framepack.HunyuanVideoFramepackTransformer3DModel"
_MODEL_15 = f"{_DIFFUSERS}15.HunyuanVideo15Transformer3DModel"

# Text as long as the pipelines of diffusers make it, for 1.5 of 1000 + 256 tokens of two encoders and 729 of an image.
# Framepack lacks: what its history adds grows with the picture, which no number of text tokens can say.
GEOMETRIES = {
    "hunyuanvideo": ModelGeometry(text_tokens=256),
    "hunyuanvideo-1.5": ModelGeometry(spatial_stride=16, patch_size=(1, 1, 1), text_tokens=1985),
}
# The defaults of diffusers' classes, which the published weights have.
TRANSFORMERS = {
    "hunyuanvideo": TransformerFlops(60, 3072, 12288, cross_attention=False),
    "hunyuanvideo-framepack": TransformerFlops(60, 3072, 12288, cross_attention=False),
    "hunyuanvideo-1.5": TransformerFlops(54, 2048, 8192, cross_attention=False),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    layers = config["num_layers"] + config.get("num_single_layers", 0)
    return TransformerFlops(layers, width, int(width * config["mlp_ratio"]), cross_attention=False)


FLOPS = {_MODEL: _flops, _FRAMEPACK: _flops, _MODEL_15: _flops}

_JOINT, _TEXT = ("video", "text"), Split(1, ("text",))
_ATTENTION = Attention(_JOINT, unmasked="video", arguments={"attention_mask": Split(3, _JOINT)})
_DOUBLE, _SINGLE = "transformer_blocks", "single_transformer_blocks"

BLOCKS = {
    _MODEL: (f"{_DOUBLE}.*", f"{_SINGLE}.*"),
    _FRAMEPACK: (f"{_DOUBLE}.*", f"{_SINGLE}.*"),
    _MODEL_15: (f"{_DOUBLE}.*",),
}


def _lists(model: nn.Module) -> list[str]:
    """Those that have blocks."""
    return [name for name in (_DOUBLE, _SINGLE) if [*model.get_submodule(name).children()]]


def _split_plan(model: nn.Module) -> SplitPlan:
    lists = _lists(model)
    block: dict[str, Split | Count] = {"attention_mask": Split(3, _JOINT)}
    if model.config["image_condition_type"] == "token_replace":  # type: ignore[index]
        block["num_tokens"] = Count()
    return SplitPlan(
        inputs={
            f"{lists[0]}.0": {"hidden_states": Split(1), "encoder_hidden_states": _TEXT},
            **{f"{name}.*": block for name in lists},
        },
        outputs={"rope": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={f"{name}.*.attn": _ATTENTION for name in lists},
    )


def _split_plan_of_framepack(model: nn.Module) -> SplitPlan:
    lists, tables = _lists(model), {_DOUBLE: "freqs_cis", _SINGLE: "image_rotary_emb"}
    return SplitPlan(
        inputs={
            f"{lists[0]}.0": {"hidden_states": Split(1), "encoder_hidden_states": _TEXT},
            **{
                f"{name}.*": {"attention_mask": Split(3, _JOINT), tables[name]: Split(0, keeps_whole=True)}
                for name in lists
            },
        },
        outputs={},
        gathers={f"{lists[-1]}.-1": {0: Split(1)}},
        attention={f"{name}.*.attn": _ATTENTION for name in lists},
    )


def _split_plan_15(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            f"{_DOUBLE}.0": {"hidden_states": Split(1), "encoder_hidden_states": _TEXT},
            f"{_DOUBLE}.*": {"attention_mask": _TEXT},
        },
        outputs={"rope": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={f"{_DOUBLE}.*.attn": Attention(_JOINT, padded_rows=True, arguments={"attention_mask": _TEXT})},
    )


SPLIT_PLANS = {
    _MODEL: with_hidden_exchange(_split_plan),
    _FRAMEPACK: with_hidden_exchange(_split_plan_of_framepack),
    _MODEL_15: with_hidden_exchange(_split_plan_15),
}

_VIDEO = Projection(rotary="image_rotary_emb")
_OF_TEXT = Projection("encoder_hidden_states", **OF_ADDED, output="to_add_out")
_PROJECTIONS = {
    f"{_DOUBLE}.*.attn": {"video": _VIDEO, "text": _OF_TEXT},
    f"{_SINGLE}.*.attn": {"video": _VIDEO, "text": Projection("encoder_hidden_states", output="to_add_out")},
}

PROJECTIONS = {model: lambda _: _PROJECTIONS for model in SPLIT_PLANS}
