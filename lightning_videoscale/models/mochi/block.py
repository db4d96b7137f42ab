"""The fused block of Mochi: RMS norms in front of each branch and behind it, a scale, and a gate of tanh.

Each op rounds once, as diffusers' norms do. diffusers' gates round three times, so that in half precision the fused
block's outputs are nearer to the exact ones, and not the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, for_samples
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, TRIED
from lightning_videoscale.injection.parts import KnownClass, Part
from lightning_videoscale.injection.residual_stream import ResidualStream, attend_between

_HOME = "diffusers.models.transformers.transformer_mochi"
_ADAPTIVE = KnownClass(
    f"{_HOME}.MochiRMSNormZero", "diffusers' MochiRMSNormZero", {"247f055960197d18-6812f0262963903199bf2": TRIED}
)
_ADAPTIVE_LAST = KnownClass(
    f"{_HOME}.MochiLayerNormContinuous",
    "diffusers' MochiLayerNormContinuous",
    {"f2bf95f7187eef09-dadd7e5f311655a": TRIED},
)
_MODULATED = KnownClass(
    f"{_HOME}.MochiModulatedRMSNorm",
    "diffusers' MochiModulatedRMSNorm",
    {"442e40ed0154b09b-d772f0aad4ec1e119944c": TRIED},
)


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    encoder_attention_mask: Tensor,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    stream = partial(ResidualStream, self, rounding="fp32_once")
    video, text = stream(hidden_states), stream(encoder_hidden_states)
    attention, feed_forward = _embedded(self.norm1, temb, hidden_states, (self.norm2, self.norm4))
    if self.context_pre_only:
        of_text = self.norm1_context.norm.norm, _embedded_last(self.norm1_context, temb, encoder_hidden_states)
    else:
        behind = self.norm2_context, self.norm4_context
        text_attention, text_feed_forward = _embedded(self.norm1_context, temb, encoder_hidden_states, behind)
        of_text = self.norm1_context.norm, text_attention
    named = {"image_rotary_emb": image_rotary_emb, "attention_mask": encoder_attention_mask}
    attend_between(self.attn1, (video, self.norm1.norm, attention), (text, *of_text), **named)
    video.branch(self.ff, self.norm3.norm, feed_forward)
    if self.context_pre_only:
        return video.end(), encoder_hidden_states
    text.branch(self.ff_context, self.norm3_context.norm, text_feed_forward)
    return video.end(), text.end()


def _embedded(norm: Any, temb: Tensor, x: Tensor, behind: tuple[Any, Any]) -> tuple[Modulation, Modulation]:
    """Of attention and feed-forward, behind which these norms are."""
    embedded = for_samples(norm.linear(norm.silu(temb)), x.shape[0])
    scale, gate, of_feed_forward, gate_of_feed_forward = embedded.unsqueeze(1).chunk(4, dim=-1)
    return (
        Modulation(None, scale, gate, normed_eps=behind[0].norm.eps),
        Modulation(None, of_feed_forward, gate_of_feed_forward, normed_eps=behind[1].norm.eps),
    )


def _embedded_last(norm: Any, temb: Tensor, x: Tensor) -> Modulation:
    """Of the last block's text, which goes no further than to its attention."""
    scale = for_samples(norm.linear_1(norm.silu(temb).to(x.dtype)), x.shape[0])
    return Modulation(None, scale.unsqueeze(1), None)


_RMS = ("norm1.norm", "norm2.norm", "norm3.norm", "norm4.norm")
_RMS_OF_TEXT = ("norm2_context.norm", "norm3_context.norm", "norm4_context.norm", "norm1_context.norm.norm")
_BLOCK = FusedBlock(
    class_path=f"{_HOME}.MochiTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of video and text, with their branches' norms",
    known_forwards={"6b7529ba09f04a65-26378028f017549efb1b464be908a8": TRIED},
    parts=(
        Part("norm1", _ADAPTIVE),
        Part("norm1_context", _ADAPTIVE, _ADAPTIVE_LAST),
        Part("norm1_context.norm", DIFFUSERS_RMS_NORM, _MODULATED),
        *(Part(name, _MODULATED) for name in ("norm2", "norm3", "norm4", "norm4_context")),
        *(Part(name, _MODULATED, optional=True) for name in ("norm2_context", "norm3_context")),
        *(Part(name, DIFFUSERS_RMS_NORM) for name in _RMS),
        *(Part(name, DIFFUSERS_RMS_NORM, optional=True) for name in _RMS_OF_TEXT),
    ),
    branches=("attn1",),
)
FUSED_BLOCKS = {_BLOCK.class_path: _BLOCK}
