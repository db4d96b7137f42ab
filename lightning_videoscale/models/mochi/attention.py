"""The fused attention of Mochi: video, which is rotated by tables of each head, and text that is cut to what counts.

Mochi learns its frequencies. While these are trained, the kernel normalises alone, since it has no gradient for tables.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.attention import (
    OF_ADDED,
    Processor,
    Projected,
    attend_jointly,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.norms import MOCHI_RMS_NORM, TRIED
from lightning_videoscale.models.mochi.split import PROCESSOR, OneCallProcessor, Tables, attend_in_one_call, rotated

_CALL = (
    "b7b0e7c1cd93a2f8-0f4a03d78f535b54dcd01a26e9465a6745d02deffe5bfac8b0034d5f454b04c9e7e5e5658c2282b826559d5aa2e169508"
    "a8"
)
_DIFFUSERS = Processor(PROCESSOR, {_CALL: TRIED}, norms=(MOCHI_RMS_NORM,), helpers={})
_OF_SPLIT = Processor(class_path(OneCallProcessor), {}, norms=(MOCHI_RMS_NORM,), helpers={})
"""What takes diffusers' place when a model is split, after its attention was fused."""

_ARGUMENTS = {"image_rotary_emb", "detach_bias"}


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    is_split = type(self.processor) is OneCallProcessor
    unknown = bool(kwargs.keys() - _ARGUMENTS) or encoder_hidden_states is None or attention_mask is None
    original = original_if_changed(self, _OF_SPLIT if is_split else _DIFFUSERS, as_before=unknown)
    if original is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
    assert encoder_hidden_states is not None and attention_mask is not None
    video = _video(self, hidden_states, kwargs.get("image_rotary_emb"))
    streams = video, projected(self, encoder_hidden_states, **OF_ADDED)
    exchange = partial(attend_in_one_call if is_split else _attend_by_sample, text_mask=attention_mask)
    attended = attend_jointly(self, streams, exchange)
    of_video, text = attended.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
    output = project_out(self, of_video, detach_bias=kwargs.get("detach_bias", False))
    return output, self.to_add_out(text) if hasattr(self, "to_add_out") else text


def _video(attn: Any, tokens: Tensor, tables: Tables | None) -> Projected:
    if tables is None:
        return projected(attn, tokens)
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        stream = projected(attn, tokens)
        return Projected(partial(_rotate, stream, tables), stream.values)
    cos, sin = tables
    return projected(attn, tokens, rope=(cos[None], sin[None]))


def _rotate(stream: Projected, tables: Tables) -> tuple[Tensor, Tensor]:
    query, key = (rotated(x, tables) for x in stream.queries_and_keys())
    return query, key


def _attend_by_sample(query: Tensor, key: Tensor, value: Tensor, text_mask: Tensor) -> Tensor:
    """As diffusers attends: without what does not count, whose place is behind all else in what comes out."""
    tokens, video = query.shape[1], query.shape[1] - text_mask.shape[1]
    first = torch.arange(video, device=query.device)
    attended = []
    for sample, counts in enumerate(text_mask):
        rows = torch.cat([first, torch.nonzero(counts, as_tuple=False).flatten() + video])
        q, k, v = (x[sample : sample + 1, rows].transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=False).transpose(1, 2)
        attended.append(F.pad(out, (0, 0, 0, 0, 0, tokens - rows.shape[0])))
    return torch.cat(attended)


_ATTENTION = fused_attention(
    _DIFFUSERS,
    _forward,
    "diffusers.models.attention_processor.MochiAttention",
    {"c9baeb7e9195bd12-42a779": TRIED},
)
FUSED_BLOCKS = {_ATTENTION.class_path: _ATTENTION}
