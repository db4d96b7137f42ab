"""The fused attention of Kandinsky 5, of video and of text.

Its norms see float32 and have torch's default eps. What is rotated is rounded to bfloat16 in any dtype, as diffusers
does, in backward too. NABLA's mask is made of the fused queries and keys by diffusers' own function.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.injection.attention import (
    Processor,
    Projected,
    attend_jointly,
    changed_attention,
    fused_attention,
    original_if_changed,
    projected,
)
from lightning_videoscale.injection.branch_bias import changed_linear, without_bias_gradient
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.norms import TRIED
from lightning_videoscale.injection.parts import KnownClass

HOME = "diffusers.models.transformers.transformer_kandinsky"
_LINEARS, _NORMS = ("to_query", "to_key", "to_value"), ("query_norm", "key_norm")


def _misfit(norm: Any) -> str | None:
    sizes = tuple(norm.normalized_shape)
    return None if len(sizes) == 1 else f"is not over the channels, but over the last dimensions {sizes}"


_PROCESSOR = Processor(
    class_path=f"{HOME}.Kandinsky5AttnProcessor",
    known_calls={"f76cf90c660dc95a-563657ea1d5c03f4e2d16aed9015a39c0e0a": TRIED},
    norms=(KnownClass("torch.nn.modules.normalization.RMSNorm", "torch's RMSNorm", misfit=_misfit),),
    helpers={},
    pairs=(_NORMS,),
)


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    sparse_params: Mapping[str, Any] | None = None,
    rotary_emb: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if (original := original_if_changed(self, _PROCESSOR, as_before=bool(kwargs.keys() - {"detach_bias"}))) is not None:
        unchanged: Tensor = original(hidden_states, encoder_hidden_states, sparse_params, rotary_emb, **kwargs)
        return unchanged
    rope = None if rotary_emb is None else (rotary_emb[..., 0, 0], rotary_emb[..., 1, 0])
    stream = projected(self, hidden_states, encoder_hidden_states, linears=_LINEARS, norms=_NORMS, rope=rope)
    if rope is not None:
        stream = Projected(partial(_rounded, stream), stream.values)
    attended = attend_jointly(self, [stream], partial(_exchange, self.processor, sparse_params))
    output = without_bias_gradient if kwargs.get("detach_bias", False) else nn.Module.__call__
    projected_out: Tensor = output(self.out_layer, attended)
    return projected_out


def _rounded(stream: Projected) -> tuple[Tensor, Tensor]:
    query, key = (x.to(torch.bfloat16).type_as(x) for x in stream.queries_and_keys())
    return query, key


def _exchange(processor: Any, sparse: Mapping[str, Any] | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = None
    if sparse is not None:
        mask = sys.modules[HOME].nablaT_v2(query, key, sparse["sta_mask"], thr=sparse["P"])
    return Dispatched(processor, mask)(query, key, value)


def _last_linear(attn: Any) -> nn.Linear | str:
    if (change := changed_attention(attn, _PROCESSOR)) is not None:
        return change
    if (change := changed_linear(attn.out_layer)) is not None:
        return f"out_layer {change}"
    return "out_layer has no bias" if attn.out_layer.bias is None else attn.out_layer


_ATTENTION = replace(
    fused_attention(
        _PROCESSOR, _forward, f"{HOME}.Kandinsky5Attention", {"d168e3b2dc70a885-c1fbb2a61e991e8c6c515": TRIED}
    ),
    last_linear=_last_linear,
)
FUSED_BLOCKS = {_ATTENTION.class_path: _ATTENTION}
