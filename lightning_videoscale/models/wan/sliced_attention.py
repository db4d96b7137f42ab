"""Wan's self-attention whose messages are slices of its projections; see `parallel.schedules`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.injection.branch_bias import changed_linear
from lightning_videoscale.kernels.recompute import recomputed
from lightning_videoscale.models.wan.attention import AUTOCAST_WIDENS_NORMS, Rotary
from lightning_videoscale.parallel.attention import attend_heads
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.messages import Linear
from lightning_videoscale.parallel.schedules.sliced_input import Norm, norm_again, project_heads
from lightning_videoscale.parallel.schedules.sliced_output import attend_and_project, project_output
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads


def attend_sliced(
    attn: Any,
    hidden_states: Tensor,
    rotary_emb: Rotary,
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
    mesh, lengths, heads = context.mesh, context.lengths(), attn.heads
    size, start = mesh.ulysses.size, mesh.ring.rank * mesh.ulysses.size
    of_group = lengths[start : start + size]
    ulysses = Ulysses(
        mesh.ulysses, assign_heads(mesh.ulysses.rank, of_group, of_group, heads, heads), context.transport
    )
    norm = _norm(attn, hidden_states, rotary_emb, context, ulysses, sum(lengths[:start]), sum(of_group))
    parts = project_heads(hidden_states, _projections(attn, hidden_states), norm, ulysses, heads, by_slices=by_slices)
    query, key = parts.query, parts.key
    assert parts.before_norm is not None
    again = partial(norm_again, parts.before_norm, hidden_states.shape[0], norm)
    projection, dropout = attn.to_out
    plain = changed_linear(projection) is None
    linear = _plain(projection, detach_bias=detach_bias) if plain else None
    scale = query.shape[3] ** -0.5
    with recomputed((query, key), again, recompute=getattr(attn, "recompute_norms", False)):
        if mesh.ring.size == 1 and by_slices:
            output = attend_and_project(query, key, parts.value, linear, ulysses, choices, scale)
        else:
            one = ulysses.heads.repeats
            out = attend_heads(query, key, parts.value, mesh, lengths, one, context.transport, scale, choices)
            output = project_output(out, linear, ulysses, by_slices=by_slices)
    if detach_bias and plain:  # there is no dropout then, either
        return output
    dropped: Tensor = dropout(output if plain else projection(output))
    return dropped


def _projections(attn: Any, x: Tensor) -> list[Linear | Tensor]:
    """Each Linear as it is, or where it is more than that, what it returns."""
    if getattr(attn, "fused_projections", False):
        return list(attn.to_qkv(x).chunk(3, dim=-1))
    linears: tuple[nn.Module, ...] = attn.to_q, attn.to_k, attn.to_v
    return [_plain(each) if changed_linear(each) is None else each(x) for each in linears]


def _plain(linear: Any, *, detach_bias: bool = False) -> Linear:
    return linear.weight, linear.bias.detach() if detach_bias and linear.bias is not None else linear.bias


def _norm(
    attn: Any,
    x: Tensor,
    rotary_emb: Rotary,
    context: SequenceContext,
    ulysses: Ulysses,
    first: int,
    tokens: int,
) -> Norm:
    """The norm over all heads, with what it reads of this rank's heads and of the Ulysses group's tokens."""
    width = attn.norm_q.weight.shape[0]
    mine, dim = ulysses.heads.out.heads[0][ulysses.axis.rank], width // attn.heads
    weights = tuple(norm.weight[mine.start * dim : mine.stop * dim] for norm in (attn.norm_q, attn.norm_k))
    widened = AUTOCAST_WIDENS_NORMS and x.is_cuda and torch.is_autocast_enabled("cuda")
    across_heads = NormAcrossHeads(
        width, attn.norm_q.eps, "at_end" if widened else "fp32_once", getattr(attn, "kernel_backend", "auto")
    )
    if rotary_emb is None:
        return Norm(across_heads, NormTensors(weights, (None, None)))
    whole = (context.record.whole(table).narrow(1, first, tokens) for table in rotary_emb)
    cos, sin = (table[..., offset::2] for table, offset in zip(whole, (0, 1), strict=True))
    batch, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
    return Norm(across_heads, NormTensors(weights, (_rows(cos, batch, wide), _rows(sin, batch, wide))))


def _rows(table: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """(1, S · B, 1, P) of (1 or B, S, 1, P): tokens first, with all samples of each."""
    pairs = table.shape[-1]
    return table.to(dtype).expand(batch, -1, -1, -1).transpose(0, 1).reshape(1, -1, 1, pairs)
