"""Wan's self-attention, whose exchange is hidden behind its projections; see `parallel.schedules`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.injection.branch_bias import changed_linear
from lightning_videoscale.kernels.recompute import recomputed
from lightning_videoscale.models.hidden_exchange.across_heads import norm_across
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement
from lightning_videoscale.models.hidden_exchange.projections import linears_of
from lightning_videoscale.models.wan.attention import WanRotary
from lightning_videoscale.parallel import Projection, SequenceContext
from lightning_videoscale.parallel.attention import attend_heads
from lightning_videoscale.parallel.schedules.attention_output import attend_and_project, project_output
from lightning_videoscale.parallel.schedules.input_projections import norm_again, project_heads
from lightning_videoscale.parallel.schedules.messages import Linear

OF_SELF = Projection(across_heads=True, rotary="rotary_emb", layout="bshd", joined="to_qkv")
"""Of Wan's self-attention, which its kin have, too."""


def attend_hiding_exchange(
    attn: Any,
    hidden_states: Tensor,
    rotary_emb: WanRotary,
    context: SequenceContext,
    choices: AttentionChoices,
    *,
    by_slices: bool,
    detach_bias: bool,
) -> Tensor:
    """What `attend` computes in self-attention, with the exchanges inside the projections.

    Args:
        attn: diffusers' ``WanAttention``, whose norms are as diffusers makes them; its blocks fused or not.
        hidden_states: (B, s, D), this rank's tokens.
        rotary_emb: Of these tokens' positions, or None.
        context: The group, of two Ulysses ranks or more, and the split tables.
        choices: What chooses the kernel of attention.
        by_slices: Whether messages are slices of matrix products and of attention, or leave one projection at a time.
        detach_bias: Leaves the gradient of the output projection's bias to the caller.

    Returns:
        (B, s, D).
    """
    mesh, lengths = context.mesh, context.lengths()
    place = HeadPlacement(context, attn.heads)
    ulysses = place.ulysses(("video",))
    norm = norm_across(attn, OF_SELF, rotary_emb, "video", place, hidden_states)
    linears = linears_of(attn, OF_SELF, hidden_states)
    parts = project_heads(hidden_states, linears, norm, ulysses, attn.heads, by_slices=by_slices)
    query, key = parts.query, parts.key
    assert parts.before_norm is not None
    again = partial(norm_again, parts.before_norm, hidden_states.shape[0], norm)
    projection, dropout = attn.to_out
    plain = changed_linear(projection) is None
    linear: Linear | None = None
    if plain:
        bias = projection.bias
        linear = projection.weight, bias.detach() if detach_bias and bias is not None else bias
    scale = query.shape[3] ** -0.5
    with recomputed((query, key), again, recompute=getattr(attn, "recompute_norms", False)):
        if mesh.ring.size == 1 and by_slices:
            output = attend_and_project(query, key, parts.value, linear, ulysses, choices, scale)
        else:
            one = ulysses.heads.repeats
            transport, number = context.transport, context.number
            out = attend_heads(query, key, parts.value, mesh, lengths, one, transport, scale, choices, number=number)
            output = project_output(out, linear, ulysses, by_slices=by_slices)
    if detach_bias and plain:  # there is no dropout then, either
        return output
    dropped: Tensor = dropout(output if plain else projection(output))
    return dropped
