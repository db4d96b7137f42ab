"""The fused attentions of Cosmos: to itself and to text, and in 2.5 to an image too, by projections of its own."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from lightning_videoscale.injection.attention import (
    Processor,
    Projected,
    Rotary,
    attend_jointly,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
    rotary_helper,
)
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, TRIED
from lightning_videoscale.kernels import rope_per_pair

HOME = "diffusers.models.transformers.transformer_cosmos"
_OF_IMAGE: dict[str, Any] = {"linears": ("q_img", "k_img", "v_img"), "norms": ("q_img_norm", "k_img_norm")}
_PROCESSOR = Processor(
    class_path=f"{HOME}.CosmosAttnProcessor2_0",
    known_calls={
        "89383a7f11a3ca1d-240f19a0370aa5ac7012cf841246957964f0addc5a5e7097aa2e1644c": TRIED,
    },
    norms=(DIFFUSERS_RMS_NORM,),
    helpers=rotary_helper(),
)
_PROCESSOR_25 = Processor(
    class_path=f"{HOME}.CosmosAttnProcessor2_5",
    known_calls={
        "bddeef15b1d740b9-0f403aa14c8f9faa033959c4c7012cf841246957964f0addc5a6d0a74100aa2e1644c": TRIED,
    },
    norms=(DIFFUSERS_RMS_NORM,),
    helpers=rotary_helper(),
    pairs=(("norm_q", "norm_k"), _OF_IMAGE["norms"]),
)
_ARGUMENTS = {"image_rotary_emb", "detach_bias"}


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    as_before = bool(cross_attention_kwargs.keys() - _ARGUMENTS)
    if (original := original_if_changed(self, _PROCESSOR, as_before=as_before)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    rotary = cross_attention_kwargs.get("image_rotary_emb")
    attended = _attended(self, hidden_states, encoder_hidden_states, rotary, attention_mask)
    return project_out(self, attended, detach_bias=cross_attention_kwargs.get("detach_bias", False))


def _forward_25(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    attention_mask: Any = None,
    **cross_attention_kwargs: Any,
) -> Any:
    as_before = bool(cross_attention_kwargs.keys() - _ARGUMENTS) or not isinstance(encoder_hidden_states, tuple)
    if (original := original_if_changed(self, _PROCESSOR_25, as_before=as_before)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    text, image = encoder_hidden_states or (None, None)
    text_mask, image_mask = attention_mask or (None, None)
    attended = _attended(self, hidden_states, text, cross_attention_kwargs.get("image_rotary_emb"), text_mask)
    if image is not None:
        stream = projected(self, hidden_states, image, rounding="eager", **_OF_IMAGE)
        attended = attended + _attend(self, stream, image_mask)
    return project_out(self, attended, detach_bias=cross_attention_kwargs.get("detach_bias", False))


def _attended(attn: Any, tokens: Tensor, source: Tensor | None, rotary: Rotary, mask: Tensor | None) -> Tensor:
    rope = None if rotary is None else rope_per_pair(*rotary, "half")
    stream = projected(attn, tokens, source, rounding="eager", rope=rope, rope_layout="half")
    return _attend(attn, stream, mask)


def _attend(attn: Any, stream: Projected, mask: Tensor | None) -> Tensor:
    """By diffusers' own choice; these processors do not hear of a backend that is set for a model."""
    home: Any = sys.modules[HOME]

    def exchange(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended: Tensor = home.dispatch_attention_fn(query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return attended

    return attend_jointly(attn, [stream], exchange)


FUSED_ATTENTIONS = {
    _PROCESSOR.class_path: fused_attention(_PROCESSOR, _forward),
    _PROCESSOR_25.class_path: fused_attention(
        _PROCESSOR_25, _forward_25, f"{HOME}.CosmosAttention", {"08f7c2563c63a9c1-8096cc": TRIED}
    ),
}
