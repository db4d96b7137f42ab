"""Stable Diffusion 3 and 3.5 as diffusers has them (`SD3Transformer2DModel`): sizes, split plan and fused forwards.

Text and image are streams of their own and attend together, image first. In some blocks of 3.5-medium the image also
attends to itself. The last block makes nothing of its text but keys and values. Positions are added to the patches in
front of the blocks, cropped from a larger table; what a ControlNet adds between blocks is of the image's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import chunk_of_feed_forward
from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import (
    OF_ADDED,
    Processor,
    attend_jointly,
    attended_by_torch,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.branch_bias import branch_and_bias
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, of_adaptive_norm, of_last_norm
from lightning_videoscale.injection.norms import (
    ADA_LAYER_NORM_CONTINUOUS,
    ADA_LAYER_NORM_ZERO,
    ADA_LAYER_NORM_ZERO_TWICE,
    DIFFUSERS_RMS_NORM,
    LAYER_NORM,
    TRIED,
)
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream, attend_between
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
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


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

_TEXT = Projection("encoder_hidden_states", **OF_ADDED, output="to_add_out")
_PROJECTIONS = {_JOINT: {"video": Projection(), "text": _TEXT}, _OWN: {"video": Projection()}}

PROJECTIONS = {_MODEL: lambda _: _PROJECTIONS}

_PROCESSOR = Processor(
    class_path="diffusers.models.attention_processor.JointAttnProcessor2_0",
    known_calls={"012bafc78017c311-08b93ab4aa03d78f53ca11fc97fe54b8da26e948cbc0bad17f7e63aa2e16290": TRIED},
    norms=(DIFFUSERS_RMS_NORM,),
    helpers={},
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    others = bool(cross_attention_kwargs.keys() - {"detach_bias"}) or attention_mask is not None
    if (original := original_if_changed(self, _PROCESSOR, as_before=others)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    detach_bias = cross_attention_kwargs.get("detach_bias", False)
    streams = [projected(self, hidden_states, rounding="eager")]
    if encoder_hidden_states is None:
        return project_out(self, attend_jointly(self, streams, attended_by_torch), detach_bias=detach_bias)
    streams.append(projected(self, encoder_hidden_states, rounding="eager", **OF_ADDED))
    attended = attend_jointly(self, streams, attended_by_torch)
    image, text = attended.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
    output = project_out(self, image, detach_bias=detach_bias)
    return output, text if self.context_pre_only else self.to_add_out(text)


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    attention, feed_forward, *own = of_adaptive_norm(
        self.norm1, temb, 3 if self.use_dual_attention else 2, hidden_states.shape[0]
    )
    of_text = _of_text(self, temb, encoder_hidden_states)
    image, text = (ResidualStream(self, x, rounding="eager") for x in (hidden_states, encoder_hidden_states))
    y = kept = None
    if own:  # reads the image from in front of the joint attention
        y = image.norm(self.norm1.norm, own[0])
        kept = image.recomputed(y)
    attend_between(self.attn, (image, self.norm1.norm, attention), (text, self.norm1_context.norm, of_text[0]))
    if kept is not None:
        with kept:
            attended, bias = branch_and_bias(self.attn2, hidden_states=y)
        image.add(attended, own[0], bias)
    image.branch(self.ff, self.norm2, feed_forward)
    if self.context_pre_only:
        return None, image.end()
    text.branch(self.ff_context, self.norm2_context, of_text[1])
    return text.end(), image.end()


def _change(block: Any) -> str | None:
    return None if chunk_of_feed_forward(block) is None else "its feed-forward was told to run in chunks"


def _of_text(block: Any, temb: Tensor, text: Tensor) -> list[Modulation]:
    norm = block.norm1_context
    if not block.context_pre_only:
        return of_adaptive_norm(norm, temb, 2, text.shape[0])
    return [of_last_norm(norm.linear(norm.silu(temb).to(text.dtype)), text.shape[0])]


_BLOCK = FusedBlock(
    class_path="diffusers.models.attention.JointTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of image and text",
    known_forwards={"6034be028385650d-4c7b87dd057fec9bb1e6fff36a9174fb491f2948fd2d7": TRIED},
    parts=(
        Part("norm1", ADA_LAYER_NORM_ZERO, ADA_LAYER_NORM_ZERO_TWICE),
        Part("norm1.norm", LAYER_NORM),
        Part("norm1_context", ADA_LAYER_NORM_ZERO, ADA_LAYER_NORM_CONTINUOUS),
        Part("norm1_context.norm", LAYER_NORM),
        Part("norm2_context", LAYER_NORM, optional=True),
        Part("norm2", LAYER_NORM),
    ),
    change=_change,
    unless_given="joint_attention_kwargs",
    branches=("attn", "attn2", "ff", "ff_context"),
)
FUSED_BLOCKS = {_BLOCK.class_path: _BLOCK}
FUSED_ATTENTIONS = {_PROCESSOR.class_path: fused_attention(_PROCESSOR, _attend)}
