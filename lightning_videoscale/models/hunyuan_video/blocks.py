"""The fused blocks of HunyuanVideo, Framepack and HunyuanVideo-1.5: norms and gates of two streams, or of one.

All is rounded after every operation, as diffusers' code does. With "token_replace" the first frame's tokens have a
timestep of their own; eager code cuts the sequence there, and here each token names its modulation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, of_adaptive_norm, per_segment
from lightning_videoscale.injection.norms import ADA_LAYER_NORM_ZERO, ADA_LAYER_NORM_ZERO_SINGLE, LAYER_NORM, TRIED
from lightning_videoscale.injection.parts import KnownClass, Part
from lightning_videoscale.injection.residual_stream import ResidualStream, attend_between
from lightning_videoscale.injection.side_by_side import side_by_side

_HOME = "diffusers.models.transformers.transformer_hunyuan_video"
_OF_SEGMENTS = KnownClass(
    f"{_HOME}.HunyuanVideoTokenReplaceAdaLayerNormZero",
    "diffusers' HunyuanVideoTokenReplaceAdaLayerNormZero",
    {"820ff80cba740d4f-dd52625ce8f12d51b0e508bea8c8e1": TRIED},
)
_OF_SEGMENTS_SINGLE = KnownClass(
    f"{_HOME}.HunyuanVideoTokenReplaceAdaLayerNormZeroSingle",
    "diffusers' HunyuanVideoTokenReplaceAdaLayerNormZeroSingle",
    {"27537f5ff68d0fe1-dd52625ce459b161b0e508bea8c8be": TRIED},
)


def _double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    modulations = of_adaptive_norm(self.norm1, temb, 2, hidden_states.shape[0])
    return _two_streams(self, modulations, hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis)


def _double_of_segments(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> tuple[Tensor, Tensor]:
    modulations = _embedded_segments(self.norm1, temb, token_replace_emb, hidden_states, 2, num_tokens)
    return _two_streams(self, modulations, hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis)


def _single(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    joined = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    (modulation,) = of_adaptive_norm(self.norm, temb, 1, joined.shape[0])
    return _one_stream(self, modulation, joined, encoder_hidden_states.shape[1], attention_mask, image_rotary_emb)


def _single_of_segments(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> tuple[Tensor, Tensor]:
    joined = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    (modulation,) = _embedded_segments(self.norm, temb, token_replace_emb, joined, 1, num_tokens)
    return _one_stream(self, modulation, joined, encoder_hidden_states.shape[1], attention_mask, image_rotary_emb)


def _two_streams(
    block: Any,
    modulations: list[Modulation],
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None,
    freqs_cis: Any,
) -> tuple[Tensor, Tensor]:
    attention, feed_forward = modulations
    text_attention, text_feed_forward = of_adaptive_norm(block.norm1_context, temb, 2, hidden_states.shape[0])
    video = ResidualStream(block, hidden_states, rounding="eager")
    text = ResidualStream(block, encoder_hidden_states, rounding="eager")
    attend_between(
        block.attn,
        (video, block.norm1.norm, attention),
        (text, block.norm1_context.norm, text_attention),
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
    )
    video.branch(block.ff, block.norm2, feed_forward)
    text.branch(block.ff_context, block.norm2_context, text_feed_forward)
    return video.end(), text.end()


def _one_stream(
    block: Any, modulation: Modulation, joined: Tensor, text: int, attention_mask: Tensor | None, rotary: Any
) -> tuple[Tensor, Tensor]:
    def attend(y: Tensor) -> Tensor:
        video, of_text = block.attn(
            hidden_states=y[:, :-text],
            encoder_hidden_states=y[:, -text:],
            attention_mask=attention_mask,
            image_rotary_emb=rotary,
        )
        return torch.cat([video, of_text], dim=1)

    joined = side_by_side(block, modulation, joined, attend)
    return joined[:, :-text], joined[:, -text:]


def _embedded_segments(
    norm: Any, temb: Tensor, first: Tensor, x: Tensor, branches: int, tokens: int
) -> list[Modulation]:
    of_first, of_others = norm.linear(norm.silu(first)), norm.linear(norm.silu(temb))
    return per_segment(of_first, of_others, branches, x.shape[0], (tokens, x.shape[1]))


def _fused(name: str, forward: Any, known: str, norm: KnownClass, *, home: str = _HOME) -> FusedBlock:
    double = not forward.__name__.startswith("_single")
    parts = (
        Part("norm1", norm),
        Part("norm1.norm", LAYER_NORM),
        Part("norm1_context", ADA_LAYER_NORM_ZERO),
        Part("norm1_context.norm", LAYER_NORM),
        Part("norm2", LAYER_NORM),
        Part("norm2_context", LAYER_NORM),
    )
    return FusedBlock(
        class_path=f"{home}.{name}",
        forward=forward,
        what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual"
        + (" of video and text" if double else "; gelu"),
        known_forwards={known: TRIED},
        parts=parts if double else (Part("norm", norm), Part("norm.norm", LAYER_NORM)),
        branches=("attn", "ff", "ff_context") if double else (),
    )


_DOUBLE = "fd9f47d4e1167b4e-37c29a85eef195563f6a96c01742ab1b4958fdc06c8a8"
_BLOCKS = (
    _fused("HunyuanVideoTransformerBlock", _double, _DOUBLE, ADA_LAYER_NORM_ZERO),
    _fused("HunyuanVideo15TransformerBlock", _double, _DOUBLE, ADA_LAYER_NORM_ZERO, home=f"{_HOME}15"),
    _fused(
        "HunyuanVideoTokenReplaceTransformerBlock",
        _double_of_segments,
        "0451b55a1d42fce6-5a559185eef13a368aa8c63f6a96c0305abf1602ab1b4958c74db4a8c06c8a8",
        _OF_SEGMENTS,
    ),
    _fused(
        "HunyuanVideoSingleTransformerBlock",
        _single,
        "e50f55fd651ffe72-03cf0601993a2757dd7901b8a6b4205236573758a8",
        ADA_LAYER_NORM_ZERO_SINGLE,
    ),
    _fused(
        "HunyuanVideoTokenReplaceSingleTransformerBlock",
        _single_of_segments,
        "c623908b346bb88d-4edf0601993af037dd7901b8a6b42019f4df473a8c6573758a8",
        _OF_SEGMENTS_SINGLE,
    ),
)
FUSED_BLOCKS = {block.class_path: block for block in _BLOCKS}
