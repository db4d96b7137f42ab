"""diffusers' Wan attention with its query and key norms and its rotary embedding fused.

`WAN_ATTENTION`       the fused forward, for self- and cross-attention; the attention itself stays diffusers' own choice
`query_key_value`     the projections
`fused_query_key`     norms and rotation of query and key in one launch
`project_out`         what comes after the attention
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import dispatch_settings
from lightning_videoscale.compat.torch.versions import autocast_widens_norms
from lightning_videoscale.injection.branch_bias import apply_detached, changed_linear
from lightning_videoscale.injection.bypassed import changed, unfused
from lightning_videoscale.injection.fused_block import FusedBlock, class_path, fused_block_of, original_forward
from lightning_videoscale.injection.methods import is_known, replacement_of
from lightning_videoscale.kernels import qk_norm_rope, qkv_linear
from lightning_videoscale.kernels.recompute import recomputed, run_norm

_MODULE = "diffusers.models.transformers.transformer_wan"
_ATTENTION_FORWARDS = frozenset({"a8981ab4ef376ff2"})  # diffusers 0.37 to 0.42
_PROCESSOR_CALLS = frozenset({"6bfcee2af4a77d09"})  # diffusers 0.37 to 0.42
_AUTOCAST_WIDENS_NORMS = autocast_widens_norms()  # q and k stay in float32 until attention
_IMAGE_CONTEXT_REST = 512  # tokens of text behind those of the image, which diffusers takes for granted


def can_detach(attn: Any) -> bool:
    """Whether the biases of query and key, as things are now, can be left to `fused_query_key`."""
    projections = attn.to_q, attn.to_k
    return not getattr(attn, "fused_projections", False) and all(
        changed_linear(linear) is None and linear.bias is not None for linear in projections
    )


def query_key_value(
    attn: Any, hidden_states: Tensor, context: Tensor | None, *, detach_biases: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects; (B, S, D) each.

    Args:
        attn: diffusers' ``WanAttention``, its projections fused or not.
        hidden_states: (B, S, D), what asks.
        context: (B, T, D), what is asked in cross-attention; None in self-attention.
        detach_biases: Leaves the gradients of query's and key's biases to `fused_query_key`.
    """
    asked = hidden_states if context is None else context
    if detach_biases and context is None and changed_linear(attn.to_v) is None:
        weights = attn.to_q.weight, attn.to_k.weight, attn.to_v.weight
        biases = attn.to_q.bias.detach(), attn.to_k.bias.detach(), attn.to_v.bias
        return qkv_linear(hidden_states, weights, biases)
    if detach_biases:
        return apply_detached(attn.to_q, hidden_states), apply_detached(attn.to_k, asked), attn.to_v(asked)
    if not getattr(attn, "fused_projections", False):
        return attn.to_q(hidden_states), attn.to_k(asked), attn.to_v(asked)
    if context is None:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return query, key, value
    return attn.to_q(hidden_states), *attn.to_kv(context).chunk(2, dim=-1)


def fused_query_key(
    attn: Any, query: Tensor, key: Tensor, rotary_emb: tuple[Tensor, Tensor] | None, *, detached_biases: bool
) -> tuple[Tensor, Tensor]:
    """Normalises over all heads and rotates; from (B, S, D) to (B, S, H, D/H).

    Args:
        attn: diffusers' ``WanAttention``.
        query: (B, S, D).
        key: (B, T, D), with T = S where there is a rotary embedding.
        rotary_emb: cos and sin, (1, S, 1, D/H), both members of a pair alike; or None.
        detached_biases: Whether query and key were projected with their biases detached.
    """
    rope, biases = None, {}
    if detached_biases:
        biases = {"q_proj_bias": attn.to_q.bias, "k_proj_bias": attn.to_k.bias}
    if rotary_emb is not None:
        cos, sin = rotary_emb
        rope = cos[..., 0::2], sin[..., 1::2]
    heads = (attn.heads, -1)
    normed: tuple[Tensor, Tensor] = run_norm(
        qk_norm_rope,
        query.unflatten(-1, heads),
        key.unflatten(-1, heads),
        attn.norm_q.weight,
        attn.norm_k.weight,
        **biases,
        eps=attn.norm_q.eps,
        rope=rope,
        rounding="at_end" if _AUTOCAST_WIDENS_NORMS and _under_autocast_on_cuda(query) else "fp32_once",
        backend=attn.kernel_backend,
        recompute=attn.recompute_norms,
    )
    return normed


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """The fused forward; a processor that took the place of diffusers' own is called as before."""
    change = _changed(self)
    if change is not None or foreign(self.processor) is not None or kwargs.keys() - {"detach_bias"}:
        original = original_forward(self) if change is None else unfused(self, change)
        unchanged: Tensor = original(hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        return unchanged
    context, image = encoder_hidden_states, None
    if self.add_k_proj is not None and context is not None:
        image, context = context.split([context.shape[1] - _IMAGE_CONTEXT_REST, _IMAGE_CONTEXT_REST], dim=1)
    detached = can_detach(self)
    query, key, value = query_key_value(self, hidden_states, context, detach_biases=detached)
    value = value.unflatten(-1, (self.heads, -1))
    own = encoder_hidden_states is None
    norms = partial(fused_query_key, self, query, key, rotary_emb, detached_biases=detached)
    query, key = norms()
    with recomputed((query, key), norms, recompute=self.recompute_norms):
        attended = _attend(self.processor, query, key, value, attention_mask, own)
        if image is not None:
            attended = attended + _attend(self.processor, query, *_image_key_value(self, image), None, False)
    return project_out(self, attended, kwargs.get("detach_bias", False))


def project_out(attn: Any, attended: Tensor, detach_bias: bool) -> Tensor:
    """The output projection; (B, S, D). ``detach_bias`` leaves the gradient of its bias to the caller."""
    projection, dropout = attn.to_out
    projected: Tensor = apply_detached(projection, attended) if detach_bias else dropout(projection(attended))
    return projected


def _last_linear(attn: Any) -> nn.Linear | str:
    projection, dropout = attn.to_out
    if (change := _changed(attn)) is not None:
        return change
    other = foreign(attn.processor)
    if other is not None and not getattr(attn.processor, "detaches_bias", False):
        return f"its processor is {other}"
    if (change := changed_linear(projection)) is not None:
        return f"to_out.0 {change}"
    if type(dropout) is not nn.Dropout or changed(dropout) is not None:
        return "to_out.1 is not a Dropout alone"
    if dropout.p and attn.training:
        return f"to_out.1 drops {dropout.p} of the activations"
    return "to_out.0 has no bias" if projection.bias is None else projection


def _image_key_value(attn: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_added_kv(image).chunk(2, dim=-1)
    else:
        key, value = attn.add_k_proj(image), attn.add_v_proj(image)
    return attn.norm_added_k(key).unflatten(-1, (attn.heads, -1)), value.unflatten(-1, (attn.heads, -1))


def _attend(processor: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, own: bool) -> Tensor:
    """The attention of diffusers, with the backend that it was told to use; (B, S, D)."""
    # From there, since kernels of one's own are put in its place there.
    from diffusers.models.transformers import transformer_wan

    backend, parallel_config = dispatch_settings(processor)
    attended: Tensor = transformer_wan.dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=False,
        backend=backend,
        parallel_config=parallel_config if own else None,
    )
    return attended.flatten(2, 3).type_as(query)


def _under_autocast_on_cuda(x: Tensor) -> bool:
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def foreign(processor: Any) -> str | None:
    """Returns what a processor is where it is not diffusers' own, as diffusers wrote it."""
    cls = type(processor)
    if class_path(cls) != f"{_MODULE}.WanAttnProcessor":
        return f"a {class_path(cls)}"
    replacement = replacement_of(cls, "__call__")
    return None if replacement is None else f"a WanAttnProcessor whose __call__ was replaced by {replacement}"


def _objection(attn: nn.Module) -> str | None:
    processor: Any = attn.processor
    if (other := foreign(processor)) is not None:
        return f"its processor is {other}, not diffusers' WanAttnProcessor as known here"
    if not is_known(type(processor), "__call__", _PROCESSOR_CALLS):
        return "its processor is not diffusers' WanAttnProcessor as known here"
    return _changed(attn)


def _changed(attn: Any) -> str | None:
    """Returns which norm is not as diffusers makes it, since the fused forward calls none; None if all are."""
    for name, norm in (("norm_q", attn.norm_q), ("norm_k", attn.norm_k)):
        if type(norm) is not torch.nn.RMSNorm or norm.eps is None or norm.weight is None:
            return f"{name} is not a RMSNorm with a weight and an eps, as known here, but {class_path(type(norm))}"
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
    return "norm_q and norm_k have different eps" if attn.norm_q.eps != attn.norm_k.eps else None


def is_fused(attn: nn.Module) -> bool:
    """Whether a ``WanAttention`` has the fused forward, and norms that it can compute."""
    return fused_block_of(attn) is WAN_ATTENTION and _changed(attn) is None


WAN_ATTENTION = FusedBlock(
    class_path=f"{_MODULE}.WanAttention",
    forward=_forward,
    what="norm_q, norm_k and the rotary embedding: qk_norm_rope; to_q, to_k and to_v of one input: qkv_linear",
    known_forwards=_ATTENTION_FORWARDS,
    objection=_objection,
    last_linear=_last_linear,
)
