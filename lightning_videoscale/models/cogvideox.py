"""CogVideoX 1.0, 1.5 and I2V, and ConsisID, as diffusers has them.

Text and video are streams of their own and attend together, text first. Rotary tables, where a model has them, are made
by its caller and cover the video. Between blocks ConsisID's video attends to a face, which every rank holds whole. What
its last block returns is gathered, as the model counts text tokens then; attention to the face behind it runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import (
    Processor,
    attend_jointly,
    attended_by_torch,
    expanded_mask,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
    rope_of,
    rotary_helper,
)
from lightning_videoscale.injection.branch_bias import branch_and_bias
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import of_adaptive_norm
from lightning_videoscale.injection.norms import LAYER_NORM, TRIED
from lightning_videoscale.injection.parts import KnownClass, Part
from lightning_videoscale.injection.residual_stream import ResidualStream, attend_between
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_HOME = "diffusers.models.transformers.cogvideox_transformer_3d"
_HOME_OF_CONSISID = "diffusers.models.transformers.consisid_transformer_3d"
_COGVIDEOX = f"{_HOME}.CogVideoXTransformer3DModel"
_CONSISID = f"{_HOME_OF_CONSISID}.ConsisIDTransformer3DModel"

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


FLOPS = dict.fromkeys((_COGVIDEOX, _CONSISID), partial(TransformerFlops.of_plain, cross_attention=False))

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


SPLIT_PLANS = {_COGVIDEOX: with_hidden_exchange(_split_plan), _CONSISID: with_hidden_exchange(_consisid_plan)}

_STREAMS = {"text": Projection("encoder_hidden_states"), "video": Projection(rotary="image_rotary_emb")}

PROJECTIONS = {model: lambda _: {"transformer_blocks.*.attn1": _STREAMS} for model in SPLIT_PLANS}

_PROCESSOR = Processor(
    class_path="diffusers.models.attention_processor.CogVideoXAttnProcessor2_0",
    known_calls={
        "f12300d3abe92e2f-0f6bdc0e369ff49a03d78f53ca11fc97fe54b8da26e9457afb4ad1aa2e160518a8": TRIED,
    },
    norms=(LAYER_NORM,),
    helpers=rotary_helper(),
)
_ADAPTIVE_NORM = KnownClass(
    "diffusers.models.normalization.CogVideoXLayerNormZero",
    "diffusers' CogVideoXLayerNormZero",
    {"c719434e11fd5fe0-50620e76ce9d1bd": TRIED},
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    others = cross_attention_kwargs.keys() - {"image_rotary_emb", "detach_bias"}
    as_before = bool(others) or encoder_hidden_states is None or self.is_cross_attention
    if (original := original_if_changed(self, _PROCESSOR, as_before=as_before)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    assert encoder_hidden_states is not None
    text = encoder_hidden_states.shape[1]
    rope = rope_of(cross_attention_kwargs.get("image_rotary_emb"), hidden_states)
    tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    mask = expanded_mask(self, attention_mask, tokens)
    attended = attend_jointly(
        self, [projected(self, tokens, rope=rope, start=text)], partial(attended_by_torch, mask=mask)
    )
    output = project_out(self, attended, detach_bias=cross_attention_kwargs.get("detach_bias", False))
    return output[:, text:], output[:, :text]


def _block(block: Any, hidden_states: Tensor, text: Tensor, temb: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """Both streams have one norm, and one feed-forward that sees them joined."""
    of_video, of_text = of_adaptive_norm(block.norm1, temb, 2, hidden_states.shape[0])
    video, context = (ResidualStream(block, x, rounding="eager") for x in (hidden_states, text))
    norm, length = block.norm1.norm, text.shape[1]
    attend_between(block.attn1, (video, norm, of_video), (context, norm, of_text), shared=True, **named)

    of_video, of_text = of_adaptive_norm(block.norm2, temb, 2, hidden_states.shape[0])
    joined = torch.cat([context.norm(block.norm2.norm, of_text), video.norm(block.norm2.norm, of_video)], dim=1)
    output, bias = branch_and_bias(block.ff, joined)
    video.add(output[:, length:], of_video, bias)
    context.add(output[:, :length], of_text, bias)
    return video.end(), context.end()


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    return _block(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=image_rotary_emb)


def _consisid_forward(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Any = None
) -> tuple[Tensor, Tensor]:
    return _block(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=image_rotary_emb)


def _fused(class_path: str, forward: Any, known: str, unless_given: str | None = None) -> FusedBlock:
    norms = [(Part(name, _ADAPTIVE_NORM), Part(f"{name}.norm", LAYER_NORM)) for name in ("norm1", "norm2")]
    return FusedBlock(
        class_path=class_path,
        forward=forward,
        what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of video and text",
        known_forwards={known: TRIED},
        parts=(*norms[0], *norms[1]),
        unless_given=unless_given,
        branches=("attn1", "ff"),
    )


_BLOCKS = (
    _fused(
        f"{_HOME}.CogVideoXBlock",
        _forward,
        "caf579aef46f6f81-1ebbdcf9b40fbbee4a42806bf7a1b4d052498a8",
        unless_given="attention_kwargs",
    ),
    _fused(
        f"{_HOME_OF_CONSISID}.ConsisIDBlock",
        _consisid_forward,
        "aabc9d54e4f389c2-18abdc40fa25e4a42806bf7a1b4d052498a8",
    ),
)
FUSED_BLOCKS = {block.class_path: block for block in _BLOCKS}
FUSED_ATTENTIONS = {_PROCESSOR.class_path: fused_attention(_PROCESSOR, _attend)}
