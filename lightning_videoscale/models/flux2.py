"""Flux.2 as diffusers has it (`Flux2Transformer2DModel`): its sizes, split plan and fused forwards.

Its streams are Flux's, and its inputs are split likewise. In the later blocks, which are given text and image as one
sequence, one linear layer makes queries, keys, values and the MLP's middle. The cache of reference tokens, which attend
to themselves alone, is for sampling, and refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import (
    Processor,
    Rotary,
    attend_jointly,
    fused_attention,
    normed,
    original_if_changed,
    rope_of,
    rotary_helper,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import per_sample
from lightning_videoscale.injection.norms import LAYER_NORM, RMS_NORM, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.models.flux.fused import attend_to_both, attended, clipped, projection_helpers, two_streams
from lightning_videoscale.models.flux.split import DOUBLE, JOINT, OF_DOUBLE, SINGLE, TOKENS, joint_attention
from lightning_videoscale.parallel import Projection, Refused, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_HOME = "diffusers.models.transformers.transformer_flux2"
_MODEL = f"{_HOME}.Flux2Transformer2DModel"

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
        only_serial="one layer of its single blocks makes queries, keys, values and what the feed-forward takes",
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

_OF_BOTH = Processor(
    class_path=f"{_HOME}.Flux2AttnProcessor",
    known_calls={
        "ed33ea642976f883-240c7102fd8c2c4124695e99a518e745e7f78e0aa2e16290": "diffusers 0.37 to 0.39",
        "059e6deee8416c10-240c715240bdb141246951f4a518e745e7f78e0aa2e16290": "diffusers 0.40 to 0.42.1",
    },
    norms=(RMS_NORM,),
    helpers=rotary_helper(_HOME) | projection_helpers(_HOME),
)
_OF_JOINED = Processor(
    class_path=f"{_HOME}.Flux2ParallelSelfAttnProcessor",
    known_calls={
        "96945f7872012932-cf30fbbb5ef702fd8c2c4124695a518e745e7f7783cb316044c": "diffusers 0.37 to 0.39",
        "d4dd8d733e63314f-cf30fbaa14ac4e5defef75240bdb14124695a518e745e7f7783cb316044c": "diffusers 0.40 to 0.42.1",
    },
    norms=(RMS_NORM,),
    helpers=rotary_helper(_HOME),
    pairs=(("norm_q", "norm_k"),),
)


def _attend_to_both(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Any:
    others = bool(kwargs.keys() - {"detach_bias"}) or encoder_hidden_states is None or self.added_kv_proj_dim is None
    if (original := original_if_changed(self, _OF_BOTH, as_before=others)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs)
    assert encoder_hidden_states is not None
    exchange = Dispatched(self.processor, attention_mask)
    return attend_to_both(self, hidden_states, encoder_hidden_states, image_rotary_emb, exchange, **kwargs)


def _attend_to_joined(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Any:
    if (original := original_if_changed(self, _OF_JOINED, as_before=bool(kwargs))) is not None:
        return original(hidden_states, attention_mask, image_rotary_emb, **kwargs)
    sizes = [self.inner_dim] * 3 + [self.mlp_hidden_dim * self.mlp_mult_factor]
    query, key, value, middle = self.to_qkv_mlp_proj(hidden_states).split(sizes, dim=-1)
    stream = normed(self, (query, key, value), rope=rope_of(image_rotary_emb, hidden_states))
    of_attention = attend_jointly(self, [stream], Dispatched(self.processor, attention_mask))
    return self.to_out(torch.cat([of_attention, self.mlp_act_fn(middle)], dim=-1))


def _double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    modulations = (per_sample(each, 2, hidden_states.shape[0]) for each in (temb_mod_img, temb_mod_txt))
    return two_streams(self, hidden_states, encoder_hidden_states, *modulations, image_rotary_emb=image_rotary_emb)


def _single(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    (modulation,) = per_sample(temb_mod, 1, hidden_states.shape[0])
    stream = ResidualStream(self, hidden_states, rounding="eager")
    y = stream.norm(self.norm, modulation)
    with stream.recomputed(y):
        branch = attended(self.attn, y, image_rotary_emb=image_rotary_emb)
    stream.add(branch, modulation)
    joined = clipped(stream.end())
    return (joined[:, :text_seq_len], joined[:, text_seq_len:]) if split_hidden_states else joined


_SPLIT = {"Flux2Modulation.split": "ba64ed7feb035a4d-a0741fc20db6"}
_BLOCKS = (
    FusedBlock(
        class_path=f"{_HOME}.Flux2TransformerBlock",
        forward=_double,
        what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of image and text",
        known_forwards={
            "1d8b1c8a90f4381d-0bfb8733edb58580ef6c6e91b2a2fa1f3e6f6a983f1b4d40765aa96c00fe9584772262d7": TRIED
        },
        helpers=_SPLIT,
        unless_given="joint_attention_kwargs",
        parts=tuple(Part(name, LAYER_NORM) for name in ("norm1", "norm1_context", "norm2", "norm2_context")),
    ),
    FusedBlock(
        class_path=f"{_HOME}.Flux2SingleTransformerBlock",
        forward=_single,
        what="fork_norm_modulate, gate_residual",
        known_forwards={"a6c28b5a9ab3f5f3-ace657e041b0fe2b87301e4fcce115": TRIED},
        helpers=_SPLIT,
        unless_given="joint_attention_kwargs",
        parts=(Part("norm", LAYER_NORM),),
    ),
)
FUSED_BLOCKS = {block.class_path: block for block in _BLOCKS}
FUSED_ATTENTIONS = {
    _OF_BOTH.class_path: fused_attention(
        _OF_BOTH, _attend_to_both, f"{_HOME}.Flux2Attention", {"b61b2c0d63e3eff4-189bb21a319bc6c9fa": TRIED}
    ),
    _OF_JOINED.class_path: replace(
        fused_attention(
            _OF_JOINED,
            _attend_to_joined,
            f"{_HOME}.Flux2ParallelSelfAttention",
            {"58e3fcd2a8f28e94-dc1bb21a319bc6caa0": TRIED},
        ),
        what="norms and rotation of queries and keys: qk_norm_rope",
        last_linear=None,
    ),
}
