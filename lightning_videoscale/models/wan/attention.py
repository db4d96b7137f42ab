"""What Wan's attention computes around any exchange: projections, norms and rotations, fused or one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.versions import autocast_widens_norms
from lightning_videoscale.injection.branch_bias import changed_linear, without_bias_gradient
from lightning_videoscale.injection.norms import of_one_dtype
from lightning_videoscale.kernels import qk_norm_rope, qkv_linear
from lightning_videoscale.kernels.recompute import recomputed, run_norm

AUTOCAST_WIDENS_NORMS = autocast_widens_norms()  # q and k stay in float32 until attention
_TEXT_TOKENS = 512  # behind the tokens of the image, as diffusers takes for granted

WanRotary = tuple[Tensor, Tensor] | None
"""cos and sin, (1, S, 1, D/H), both members of a pair alike."""

ExchangingAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attends from queries (B, S, H, D/H) to keys and values, with a mask or None; (B, S, H, D/H)."""


def attend(
    attn: Any,
    hidden_states: Tensor,
    context: Tensor | None,
    mask: Tensor | None,
    rotary_emb: WanRotary,
    exchange: ExchangingAttention,
    *,
    fused: bool,
    detach_bias: bool,
) -> Tensor:
    """What diffusers' ``WanAttnProcessor`` computes, around any exchange.

    Wan's query and key norms span all heads, hence norms and rotation come before the exchange.

    Args:
        attn: diffusers' ``WanAttention``, its projections fused or not.
        hidden_states: (B, S, D), the source of the queries.
        context: (B or 1, T, D), the source of keys and values in cross-attention; None in self-attention.
        mask: For the exchange.
        rotary_emb: Of these tokens' positions, or None.
        exchange: The attention itself.
        fused: Whether to run norms and rotation by one kernel.
        detach_bias: Leaves the gradient of the output projection's bias to the caller.

    Returns:
        (B, S, D).
    """
    image = None
    if attn.add_k_proj is not None and context is not None:
        image, context = context.split([context.shape[1] - _TEXT_TOKENS, _TEXT_TOKENS], dim=1)
    detached = fused and _can_detach(attn)
    if fused and context is not None:
        context = context.expand(hidden_states.shape[0], -1, -1)  # may be one text for all samples
    query, key, value = _project(attn, hidden_states, context, detach_biases=detached)
    value = value.unflatten(-1, (attn.heads, -1))
    if fused:
        norms = partial(_fused_norms, attn, query, key, rotary_emb, detached_biases=detached)
    else:
        norms = partial(_norms, attn, query, key, rotary_emb)
    query, key = norms()
    with recomputed((query, key), norms, recompute=fused and attn.recompute_norms):
        attended = exchange(query, key, value, mask).flatten(2).type_as(query)
        if image is not None:
            attended = attended + exchange(query, *_image_key_value(attn, image), None).flatten(2).type_as(query)
    projection, dropout = attn.to_out
    output: Tensor = without_bias_gradient(projection, attended) if detach_bias else dropout(projection(attended))
    return output


def _can_detach(attn: Any) -> bool:
    """Whether the biases of query and key, as things are now, can be left to `_fused_norms`."""
    projections = attn.to_q, attn.to_k
    return not getattr(attn, "fused_projections", False) and all(
        changed_linear(linear) is None and linear.bias is not None for linear in projections
    )


def _project(
    attn: Any, hidden_states: Tensor, context: Tensor | None, *, detach_biases: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, (B, S or T, D); ``detach_biases`` leaves those of query and key to `_fused_norms`."""
    source = hidden_states if context is None else context
    if detach_biases and context is None and changed_linear(attn.to_v) is None:
        weights = attn.to_q.weight, attn.to_k.weight, attn.to_v.weight
        biases = attn.to_q.bias.detach(), attn.to_k.bias.detach(), attn.to_v.bias
        return qkv_linear(hidden_states, weights, biases)
    if detach_biases:
        return (
            without_bias_gradient(attn.to_q, hidden_states),
            without_bias_gradient(attn.to_k, source),
            attn.to_v(source),
        )
    if not getattr(attn, "fused_projections", False):
        return attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
    if context is None:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return query, key, value
    return attn.to_q(hidden_states), *attn.to_kv(context).chunk(2, dim=-1)


def _image_key_value(attn: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_added_kv(image).chunk(2, dim=-1)
    else:
        key, value = attn.add_k_proj(image), attn.add_v_proj(image)
    return attn.norm_added_k(key).unflatten(-1, (attn.heads, -1)), value.unflatten(-1, (attn.heads, -1))


def _fused_norms(
    attn: Any, query: Tensor, key: Tensor, rotary_emb: WanRotary, *, detached_biases: bool
) -> tuple[Tensor, Tensor]:
    """Normalises query and key over all heads and rotates them; from (B, S, D) to (B, S, H, D/H)."""
    rope, biases = None, {}
    if detached_biases:
        biases = {"q_proj_bias": attn.to_q.bias, "k_proj_bias": attn.to_k.bias}
    if rotary_emb is not None:
        cos, sin = rotary_emb
        rope = cos[..., 0::2], sin[..., 1::2]
    heads = (attn.heads, -1)
    widened = AUTOCAST_WIDENS_NORMS and query.is_cuda and torch.is_autocast_enabled("cuda")
    normed: tuple[Tensor, Tensor] = run_norm(
        qk_norm_rope,
        query.unflatten(-1, heads),
        key.unflatten(-1, heads),
        *of_one_dtype(query.dtype, (attn.norm_q.weight, attn.norm_k.weight)),
        **biases,
        eps=attn.norm_q.eps,
        rope=rope,
        rounding="at_end" if widened else "fp32_once",
        backend=attn.kernel_backend,
        recompute=attn.recompute_norms,
    )
    return normed


def _norms(attn: Any, query: Tensor, key: Tensor, rotary_emb: WanRotary) -> tuple[Tensor, Tensor]:
    """What `_fused_norms` computes, operation by operation."""
    query, key = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key)))
    return (query, key) if rotary_emb is None else (_rotated(query, *rotary_emb), _rotated(key, *rotary_emb))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on interleaved pairs, rounded once to x's dtype."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)
