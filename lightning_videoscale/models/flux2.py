"""Flux.2 as diffusers has it (`Flux2Transformer2DModel`): its sizes and split plan.

Its streams are Flux's, and its inputs are split likewise. In the later blocks, which are given text and image as one
sequence, one linear layer makes queries, keys, values and the MLP's middle. The cache of reference tokens, which attend
to themselves alone, is for sampling, and refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.flux.split import DOUBLE, JOINT, OF_DOUBLE, SINGLE, TOKENS, joint_attention
from lightning_videoscale.parallel import Projection, Refused, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_MODEL = "diffusers.models.transformers.transformer_flux2.Flux2Transformer2DModel"

# Images alone; text as the pipelines pad it. The VAE's latents are of 8 x 8 pixels, and 2 x 2 of them a token.
GEOMETRIES = {"flux2": ModelGeometry(temporal_stride=1, text_tokens=512)}


def _sizes(layers: int, width: int, mlp_ratio: float = 3.0) -> TransformerFlops:
    """The MLP has three matrices, hence 1.5 times the work of one with two of the same middle."""
    return TransformerFlops(layers, width, int(width * mlp_ratio * 1.5), cross_attention=False)


# Layers and heads as in diffusers' scripts/convert_flux2_to_diffusers.py.
TRANSFORMERS = {
    "flux2-dev": _sizes(8 + 48, 6144),
    "flux2-klein-4b": _sizes(5 + 20, 3072),
    "flux2-klein-9b": _sizes(8 + 24, 4096),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _sizes(config["num_layers"] + config["num_single_layers"], width, config["mlp_ratio"])


FLOPS = {_MODEL: _flops}

BLOCKS = {_MODEL: (f"{DOUBLE}.*", f"{SINGLE}.*")}

_CACHE = Refused(
    "Reference tokens would attend to themselves alone, by positions in the whole sequence: call the network without "
    "the cache, which needs no argument, or sample on one device."
)


def _split_plan(model: nn.Module) -> SplitPlan:
    has_cache = "kv_cache_mode" in inspect.signature(type(model).forward).parameters  # earlier versions lack it
    inputs: dict[str, Rule] = {**TOKENS, **({"kv_cache_mode": _CACHE} if has_cache else {})}
    return SplitPlan(
        inputs={"": inputs},
        outputs={},
        gathers={"proj_out": {0: Split(1)}},
        attention=joint_attention(model),
    )


SPLIT_PLANS = {_MODEL: _split_plan}

_JOINED = Projection(
    linears=("to_qkv_mlp_proj", "to_qkv_mlp_proj", "to_qkv_mlp_proj"),
    packed=True,
    tokens_of=JOINT,
    rotary="image_rotary_emb",
    rotary_of=JOINT,
)
_PROJECTIONS = {f"{DOUBLE}.*.attn": OF_DOUBLE, f"{SINGLE}.*.attn": dict.fromkeys(JOINT, _JOINED)}

PROJECTIONS = {_MODEL: lambda _: _PROJECTIONS}
