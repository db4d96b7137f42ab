"""The fused attention of LTX-2, whose queries and keys may have rotary tables of their own.

One kernel rotates both by the same tables. Where video and audio attend to each other it normalises alone, and
diffusers' own function rotates.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.attention import (
    Processor,
    Projected,
    Rotary,
    attend_jointly,
    expanded_mask,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.norms import RMS_NORM
from lightning_videoscale.kernels import rope_per_pair
from lightning_videoscale.kernels.head_types import RopeLayout

HOME = "diffusers.models.transformers.transformer_ltx2"
TRIED = "diffusers 0.38 to 0.42.1"

_HELPERS = {
    f"{HOME}.apply_interleaved_rotary_emb": "64cbb179a409f235-971efc2614d9b45b69",
    f"{HOME}.apply_split_rotary_emb": (
        "9e6d6a1f253a0b23-318efcf229c4be9c30172eb71ea3216e0681235c31e9794394186feba451a85b69"
    ),
}
_ROTATIONS = {"interleaved": "apply_interleaved_rotary_emb", "split": "apply_split_rotary_emb"}
_LAYOUTS: dict[str, RopeLayout] = {"interleaved": "interleaved", "split": "half_fma"}


def _processor(name: str, known_call: str) -> Processor:
    return Processor(f"{HOME}.{name}", {known_call: TRIED}, norms=(RMS_NORM,), helpers=_HELPERS)


_PLAIN = _processor(
    "LTX2AudioVideoAttnProcessor",
    "dd6d4e0ee001bfc3-7d2e2af49f19a05a0370aa5a124695ebd5b54dcd016b445e7f703baa2e1644c",
)
_PERTURBED = _processor("LTX2PerturbedAttnProcessor", "57f04e75d35d114c-844e2af49f19a05a5ad7fe8103baa2e1644c")
_PERTURBATION = {"perturbation_mask", "all_perturbed"}


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    query_rotary_emb: Rotary = None,
    key_rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Tensor:
    perturbable = class_path(type(self.processor)) == _PERTURBED.class_path
    known = _PERTURBED if perturbable else _PLAIN
    others = kwargs.keys() - {"detach_bias"} - (_PERTURBATION if perturbable else set())
    if (original := original_if_changed(self, known, as_before=bool(others))) is not None:
        inputs = hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb, key_rotary_emb
        unchanged: Tensor = original(*inputs, **kwargs)
        return unchanged
    mask, everywhere = kwargs.get("perturbation_mask"), kwargs.get("all_perturbed")
    if everywhere is None:
        everywhere = mask is not None and bool(torch.all(mask == 0))
    source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    if everywhere:
        attended = self.to_v(source)
    else:
        stream = _rotated(self, hidden_states, encoder_hidden_states, query_rotary_emb, key_rotary_emb)
        exchange = Dispatched(self.processor, expanded_mask(self, attention_mask, source))
        attended = attend_jointly(self, [stream], exchange)
        if mask is not None:
            attended = torch.lerp(stream.values.flatten(2), attended, mask)
    if self.to_gate_logits is not None:
        gates = 2.0 * torch.sigmoid(self.to_gate_logits(hidden_states))
        attended = (attended.unflatten(2, (self.heads, -1)) * gates.unsqueeze(-1)).flatten(2)
    return project_out(self, attended, detach_bias=kwargs.get("detach_bias", False))


def _rotated(attn: Any, tokens: Tensor, source: Tensor | None, of_query: Rotary, of_key: Rotary) -> Projected:
    of_key = of_query if of_key is None else of_key
    layout = _LAYOUTS[attn.rope_type]
    if of_query is None or (source is None and of_key is of_query and _fits(of_query, attn.heads)):
        rope = None if of_query is None else _per_head(of_query, attn.heads, layout)
        return projected(attn, tokens, source, per_head=False, rope=rope, rope_layout=layout)
    stream = projected(attn, tokens, source, per_head=False)
    return Projected(partial(_rotate_each, attn, stream, of_query, of_key), stream.values)


def _rotate_each(attn: Any, stream: Projected, of_query: Rotary, of_key: Rotary) -> tuple[Tensor, Tensor]:
    rotate: Any = getattr(sys.modules[HOME], _ROTATIONS[attn.rope_type])
    pairs = zip(stream.queries_and_keys(), (of_query, of_key), strict=True)
    query, key = (rotate(x.flatten(2), tables).unflatten(2, (attn.heads, -1)) for x, tables in pairs)
    return query, key


def _fits(tables: tuple[Tensor, Tensor], heads: int) -> bool:
    """Whether tables are those of this many heads; (B, S, H · D), or (B, H, S, D / 2)."""
    return tables[0].ndim == 3 or tables[0].shape[1] == heads


def _per_head(tables: tuple[Tensor, Tensor], heads: int, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    if cos.ndim == 4:
        return cos.transpose(1, 2), sin.transpose(1, 2)
    return rope_per_pair(cos.unflatten(-1, (heads, -1)), sin.unflatten(-1, (heads, -1)), layout)


_KNOWN_FORWARDS = {"3b57f447cf11ab9a-408bb21a3f2ec6c80344c": TRIED}
FUSED_ATTENTIONS = {
    each.class_path: fused_attention(each, _forward, f"{HOME}.LTX2Attention", _KNOWN_FORWARDS)
    for each in (_PLAIN, _PERTURBED)
}
