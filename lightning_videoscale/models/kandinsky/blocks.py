"""The fused blocks of Kandinsky 5, of text and of video: norms and gates, each rounded once as diffusers does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import per_sample
from lightning_videoscale.injection.norms import LAYER_NORM, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.models.kandinsky.attention import HOME


def _text(self: Any, x: Tensor, time_embed: Tensor, rope: Tensor) -> Tensor:
    attention, feed_forward = per_sample(self.text_modulation(time_embed), 2, x.shape[0])
    stream = ResidualStream(self, x, rounding="fp32_once")
    stream.branch(self.self_attention, self.self_attention_norm, attention, rotary_emb=rope)
    stream.branch(self.feed_forward, self.feed_forward_norm, feed_forward)
    return stream.end()


def _video(
    self: Any, visual_embed: Tensor, text_embed: Tensor, time_embed: Tensor, rope: Tensor, sparse_params: Any
) -> Tensor:
    attention, of_text, feed_forward = per_sample(self.visual_modulation(time_embed), 3, visual_embed.shape[0])
    stream = ResidualStream(self, visual_embed, rounding="fp32_once")
    rotated = {"rotary_emb": rope, "sparse_params": sparse_params}
    stream.branch(self.self_attention, self.self_attention_norm, attention, **rotated)
    stream.branch(self.cross_attention, self.cross_attention_norm, of_text, encoder_hidden_states=text_embed)
    stream.branch(self.feed_forward, self.feed_forward_norm, feed_forward)
    return stream.end()


def _fused(name: str, forward: Any, known: str, norms: tuple[str, ...], attentions: tuple[str, ...]) -> FusedBlock:
    return FusedBlock(
        class_path=f"{HOME}.{name}",
        forward=forward,
        what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual",
        known_forwards={known: TRIED},
        parts=tuple(Part(norm, LAYER_NORM) for norm in norms),
        branches=attentions,
    )


_BLOCKS = (
    _fused(
        "Kandinsky5TransformerEncoderBlock",
        _text,
        "3049b192350354b3-5be4aec05f09570235f0eb8e9042350cf",
        ("self_attention_norm", "feed_forward_norm"),
        ("self_attention",),
    ),
    _fused(
        "Kandinsky5TransformerDecoderBlock",
        _video,
        "3e2eed7dbb0e8101-05a315c0525fdf4123ff684129d123f0e72ccff123e9c",
        ("self_attention_norm", "cross_attention_norm", "feed_forward_norm"),
        ("self_attention", "cross_attention"),
    ),
)
FUSED_BLOCKS = {block.class_path: block for block in _BLOCKS}
