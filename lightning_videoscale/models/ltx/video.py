"""The fused forwards of LTX-Video: norms and gates of its blocks, and their attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.injection.attention import (
    Processor,
    Rotary,
    attend_jointly,
    expanded_mask,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import modulations
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, RMS_NORM, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.kernels import rope_per_pair

_HOME = "diffusers.models.transformers.transformer_ltx"
_PROCESSOR = Processor(
    class_path=f"{_HOME}.LTXVideoAttnProcessor",
    known_calls={"f5a5a3aba9f4ff86-240e2af49f19a0370aa5a1246952435b54dcd016b445e7f7aa2e1644c": TRIED},
    norms=(RMS_NORM,),
    helpers={f"{_HOME}.apply_rotary_emb": "04b82877ae225456-30aefc2614d9b45b69"},
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Tensor:
    if (original := original_if_changed(self, _PROCESSOR, as_before=bool(kwargs.keys() - {"detach_bias"}))) is not None:
        unchanged: Tensor = original(
            hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb=image_rotary_emb, **kwargs
        )
        return unchanged
    rope = None
    if image_rotary_emb is not None:  # (B, S, D), another entry for each head
        cos, sin = (table.unflatten(-1, (self.heads, -1)) for table in image_rotary_emb)
        rope = rope_per_pair(cos, sin, "interleaved")
    stream = projected(self, hidden_states, encoder_hidden_states, per_head=False, rope=rope)
    mask = expanded_mask(self, attention_mask, stream.values)
    attended = attend_jointly(self, [stream], Dispatched(self.processor, mask))
    return project_out(self, attended, detach_bias=kwargs.get("detach_bias", False))


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Rotary = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    per_token = temb.unflatten(-1, (6, -1))
    attention, feed_forward = modulations(self.scale_shift_table, per_token, hidden_states.shape[0])
    stream = ResidualStream(self, hidden_states, rounding="eager")
    to_itself: dict[str, Any] = {"encoder_hidden_states": None, "image_rotary_emb": image_rotary_emb}
    stream.branch(self.attn1, self.norm1, attention, by_name="hidden_states", **to_itself)
    to_text: dict[str, Any] = {"image_rotary_emb": None, "attention_mask": encoder_attention_mask}
    stream.branch(self.attn2, None, None, encoder_hidden_states=encoder_hidden_states, **to_text)
    stream.branch(self.ff, self.norm2, feed_forward)
    return stream.end()


_BLOCK = FusedBlock(
    class_path=f"{_HOME}.LTXVideoTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual (2), gate_residual_norm_modulate",
    known_forwards={"63a7d842c69054ad-6f61668588408f6cd5cd8ffc9693503cbc241b40f844c": TRIED},
    parts=(Part("norm1", DIFFUSERS_RMS_NORM), Part("norm2", DIFFUSERS_RMS_NORM)),
    branches=("attn1", "attn2", "ff"),
)
_ATTENTION = fused_attention(
    _PROCESSOR, _attend, f"{_HOME}.LTXAttention", {"355cd3386e01bd09-189bb21a3f2ec6c9fa": TRIED}
)
FUSED_BLOCKS = {block.class_path: block for block in (_BLOCK, _ATTENTION)}
