"""The fused attention of HunyuanVideo's blocks: video and text attend together, video first, which alone is rotated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.injection.attention import (
    OF_ADDED,
    Processor,
    Projected,
    Rotary,
    attend_jointly,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
    rope_of,
    rotary_helper,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, TRIED

_HOME = "diffusers.models.transformers.transformer_hunyuan_video"
_PROCESSOR = Processor(
    class_path=f"{_HOME}.HunyuanVideoAttnProcessor2_0",
    known_calls={"da5b1c260376caf8-2403d5a03d78f535b54dcd01a26e9478e7ba6b445e7f76768a8": TRIED},
    norms=(DIFFUSERS_RMS_NORM,),
    helpers=rotary_helper(),
)
_PROCESSOR_15 = Processor(
    class_path=f"{_HOME}15.HunyuanVideo15AttnProcessor2_0",
    known_calls={"d3ad9e909ea23e0d-240a03d78f535b54dcd011246956fb2cb9bd07309f693eb2bb16b445e7f76768a8": TRIED},
    norms=(DIFFUSERS_RMS_NORM,),
    helpers=rotary_helper(),
)
_ARGUMENTS = {"image_rotary_emb", "detach_bias"}


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    others = cross_attention_kwargs.keys() - _ARGUMENTS
    original = original_if_changed(self, _PROCESSOR, as_before=bool(others) or encoder_hidden_states is None)
    if original is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    assert encoder_hidden_states is not None  # without text, diffusers' processor projects nothing out
    rope = rope_of(cross_attention_kwargs.get("image_rotary_emb"), hidden_states)
    if self.add_q_proj is None:
        tokens = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        streams = [projected(self, tokens, rope=rope, rounding="eager")]
    else:
        streams = _two_streams(self, hidden_states, encoder_hidden_states, rope)
    attended = attend_jointly(self, streams, Dispatched(self.processor, attention_mask))
    return _outputs(self, attended, encoder_hidden_states, cross_attention_kwargs.get("detach_bias", False))


def _forward_15(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    others = cross_attention_kwargs.keys() - _ARGUMENTS
    incomplete = encoder_hidden_states is None or attention_mask is None
    original = original_if_changed(self, _PROCESSOR_15, as_before=bool(others) or incomplete)
    if original is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    assert encoder_hidden_states is not None and attention_mask is not None
    rope = rope_of(cross_attention_kwargs.get("image_rotary_emb"), hidden_states)
    streams = _two_streams(self, hidden_states, encoder_hidden_states, rope)
    tokens = hidden_states.shape[1] + encoder_hidden_states.shape[1]
    there = F.pad(attention_mask, (tokens - attention_mask.shape[1], 0), value=True).bool()[:, None]
    exchange = Dispatched(self.processor, there[..., None, :] & there[..., None])
    attended = attend_jointly(self, streams, exchange)
    return _outputs(self, attended, encoder_hidden_states, cross_attention_kwargs.get("detach_bias", False))


def _two_streams(attn: Any, video: Tensor, text: Tensor, rope: Rotary) -> list[Projected]:
    return [projected(attn, video, rope=rope, rounding="eager"), projected(attn, text, rounding="eager", **OF_ADDED)]


def _outputs(attn: Any, attended: Tensor, text: Tensor, detach_bias: bool) -> tuple[Tensor, Tensor]:
    length = text.shape[1]
    of_video, of_text = attended[:, :-length], attended[:, -length:]
    if attn.to_out is not None:
        of_video = project_out(attn, of_video, detach_bias=detach_bias)
    return of_video, of_text if attn.to_add_out is None else attn.to_add_out(of_text)


FUSED_ATTENTIONS = {
    _PROCESSOR.class_path: fused_attention(_PROCESSOR, _forward),
    _PROCESSOR_15.class_path: fused_attention(_PROCESSOR_15, _forward_15),
}
