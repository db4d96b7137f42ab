"""CogVideoX 1.0, 1.5 and I2V, and ConsisID, as diffusers has them.

Text and video are streams of their own and attend together, text first. Rotary tables, where a model has them, are made
by its caller and cover the video. Between blocks ConsisID's video attends to a face, which every rank holds whole. What
its last block returns is gathered, as the model counts text tokens then; attention to the face behind it runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_COGVIDEOX = "diffusers.models.transformers.cogvideox_transformer_3d.CogVideoXTransformer3DModel"
_CONSISID = "diffusers.models.transformers.consisid_transformer_3d.ConsisIDTransformer3DModel"

# Text as long as the published configurations have it. 1.5 has patches of two latent frames: an odd number of them gets
# one more, which the pipelines put in front and take out of the result.
GEOMETRIES = {
    "cogvideox": ModelGeometry(text_tokens=226),
    "cogvideox-1.5": ModelGeometry(patch_size=(2, 2, 2), text_tokens=226, pads_frames=True),
    "consisid": ModelGeometry(text_tokens=226),
}

# Layers and heads as in diffusers' scripts/convert_cogvideox_to_diffusers.py.
TRANSFORMERS = {
    "cogvideox-2b": TransformerFlops(30, 1920, 7680, cross_attention=False),
    "cogvideox-5b": TransformerFlops(42, 3072, 12288, cross_attention=False),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return TransformerFlops(config["num_layers"], width, 4 * width, cross_attention=False)


FLOPS = {_COGVIDEOX: _flops, _CONSISID: _flops}

BLOCKS = {_COGVIDEOX: ("transformer_blocks.*",), _CONSISID: ("transformer_blocks.*",)}

_TEXT = Split(1, ("text",))


def _split_plan(model: nn.Module, gathers: Mapping[str, Mapping[int, Split]] | None = None) -> SplitPlan:
    return SplitPlan(
        inputs={
            "": {"image_rotary_emb": Split(0)},
            "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": _TEXT},
        },
        outputs={},
        gathers=gathers or {"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn1": Attention(("text", "video"))},
    )


def _consisid_plan(model: nn.Module) -> SplitPlan:
    return _split_plan(model, {"transformer_blocks.-1": {0: Split(1), 1: _TEXT}})


SPLIT_PLANS = {_COGVIDEOX: _split_plan, _CONSISID: _consisid_plan}

_STREAMS = {"text": Projection("encoder_hidden_states"), "video": Projection(rotary="image_rotary_emb")}

PROJECTIONS = {model: lambda _: {"transformer_blocks.*.attn1": _STREAMS} for model in SPLIT_PLANS}
