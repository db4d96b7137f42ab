"""Wan (diffusers' `WanTransformer3DModel`): its split plan and its attention over a split sequence.

Only self-attention is exchanged. Cross-attention reads text (and image) tokens that every rank holds whole, so each
rank attends from its own tokens and nothing travels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.injection.wan_attention import (
    can_detach,
    foreign,
    fused_query_key,
    is_fused,
    project_out,
    query_key_value,
)
from lightning_videoscale.parallel import (
    SequenceContext,
    check_heads,
    read_diffusers_plan,
    register_plan,
    sequence_parallel_attention,
)
from lightning_videoscale.parallel.plan import SplitPlan, Undo

_WAN = "diffusers.models.transformers.transformer_wan.WanTransformer3DModel"


class SequenceParallelWanAttention:
    """Attention processor for the self-attention of a Wan block whose hidden states are split.

    Computes what diffusers' ``WanAttnProcessor`` computes on the whole sequence. Wan's query and key norms span all
    heads, hence they come before the exchange, as does the rotation with this rank's positions.

    Args:
        context: The group and the split tables.
    """

    detaches_bias = True  # where it is asked to, as the fused attention is

    def __init__(self, context: SequenceContext) -> None:
        self.context = context

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        detach_bias: bool = False,
    ) -> Tensor:
        """Attends from and to all tokens of the group; (B, s, dim) in and out."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("Sequence-parallel Wan self-attention takes neither other tokens nor an attention mask.")
        fused = is_fused(attn)
        detached = fused and can_detach(attn)
        query, key, value = query_key_value(attn, hidden_states, None, detach_biases=detached)
        if fused:
            query, key = fused_query_key(attn, query, key, rotary_emb, detached_biases=detached)
        else:
            query, key = query_key(attn, query, key, rotary_emb)
        value = value.unflatten(-1, (attn.heads, -1))
        out = sequence_parallel_attention(
            query,
            key,
            value,
            self.context.mesh,
            lengths=self.context.lengths_of(hidden_states.shape[1]),
            transport=self.context.transport,
        )
        return project_out(attn, out.flatten(2).type_as(query), detach_bias)


def query_key(attn: Any, query: Tensor, key: Tensor, rotary_emb: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """What `fused_query_key` computes, operation by operation."""
    query, key = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key)))
    return (query, key) if rotary_emb is None else (rotate_pairs(query, *rotary_emb), rotate_pairs(key, *rotary_emb))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on interleaved pairs, rounded once to x's dtype.

    Args:
        x: (B, s, H, D).
        cos: (1, s, 1, D), each angle's value repeated for both members of its pair.
        sin: As ``cos``.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def _install_attention(model: nn.Module, context: SequenceContext) -> Undo:
    layers: list[Any] = [block.attn1 for block in model.get_submodule("blocks").children()]
    for layer in layers:
        check_heads(layer.heads, context.mesh.ulysses.size)
        if (other := foreign(layer.processor)) is not None:
            raise ValueError(
                f"The model's self-attention has the processor {type(layer.processor).__name__}, {other}, whose "
                "computation is unknown here; sequence parallelism replaces only diffusers' own WanAttnProcessor."
            )
    originals = [layer.processor for layer in layers]
    for layer in layers:
        layer.set_processor(SequenceParallelWanAttention(context))

    def undo() -> None:
        for layer, processor in zip(layers, originals, strict=True):
            layer.set_processor(processor)

    return undo


def _wan_plan(model: nn.Module) -> SplitPlan:
    # A subclass may compute something else, of which no test here knows; FSDP2 makes one of each network it shards.
    kind = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    exact = f"{kind.__module__}.{kind.__qualname__}" == _WAN
    return replace(read_diffusers_plan(model, _install_attention), exact=exact)


register_plan(_WAN, _wan_plan)
