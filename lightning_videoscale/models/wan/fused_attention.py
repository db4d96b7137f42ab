"""The fused forward of Wan's attention, whose exchange stays diffusers' own choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import dispatch_settings
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.branch_bias import output_linear
from lightning_videoscale.injection.bypassed import changed, unfused
from lightning_videoscale.injection.fused_block import FusedBlock, original_forward
from lightning_videoscale.injection.methods import difference, replacement_of
from lightning_videoscale.models.wan.attention import Rotary, attend

MODULE = "diffusers.models.transformers.transformer_wan"
TRIED = "diffusers 0.37 to 0.42.1"
_PROCESSOR_CALLS = {"a929a3b19d975b4a-d0809db7024d1246955b54dcd01f473628721b545eed6ab5aa2e1644c": TRIED}


def foreign(processor: Any) -> str | None:
    """Returns what a processor is where it is not diffusers' own, as diffusers wrote it."""
    cls = type(processor)
    if class_path(cls) != f"{MODULE}.WanAttnProcessor":
        return f"a {class_path(cls)}"
    replacement = replacement_of(cls, "__call__")
    return None if replacement is None else f"a WanAttnProcessor whose __call__ was replaced by {replacement}"


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Tensor:
    """The fused forward; a processor that took the place of diffusers' own is called as before."""
    change = changed_attention(self)
    if change is not None or foreign(self.processor) is not None or kwargs.keys() - {"detach_bias"}:
        original = original_forward(self) if change is None else unfused(self, change)
        unchanged: Tensor = original(hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        return unchanged
    exchange = partial(_dispatch, self.processor, encoder_hidden_states is None)
    detach_bias = kwargs.get("detach_bias", False)
    inputs = hidden_states, encoder_hidden_states, attention_mask, rotary_emb
    return attend(self, *inputs, exchange, fused=True, detach_bias=detach_bias)


def _dispatch(processor: Any, own: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The attention of diffusers, with the backend that it was told to use; ``own``: self-attention."""
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
    return attended


def _last_linear(attn: Any) -> nn.Linear | str:
    if (change := changed_attention(attn)) is not None:
        return change
    other = foreign(attn.processor)
    if other is not None and not getattr(attn.processor, "detaches_bias", False):
        return f"its processor is {other}"
    return output_linear(attn)


def _object_to_attention(attn: nn.Module) -> str | None:
    processor: Any = attn.processor
    if (other := foreign(processor)) is not None:
        return f"its processor is {other}, not diffusers' WanAttnProcessor as known here"
    if (other := difference(type(processor), "__call__", _PROCESSOR_CALLS)) is not None:
        return f"the __call__ of its processor {other}"
    return changed_attention(attn)


def changed_attention(attn: Any) -> str | None:
    """Returns which norm is not as diffusers makes it, since the fused forward calls none; None if all are."""
    for name, norm in (("norm_q", attn.norm_q), ("norm_k", attn.norm_k)):
        if type(norm) is not torch.nn.RMSNorm or norm.eps is None or norm.weight is None:
            return f"{name} is not a RMSNorm with a weight and an eps, as known here, but {class_path(type(norm))}"
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
    return "norm_q and norm_k have different eps" if attn.norm_q.eps != attn.norm_k.eps else None


FUSED_ATTENTION = FusedBlock(
    class_path=f"{MODULE}.WanAttention",
    forward=_attention_forward,
    what="norm_q, norm_k and the rotary embedding: qk_norm_rope; to_q, to_k and to_v of one input: qkv_linear",
    known_forwards={"46c9d3f08be4d196-eb6a2e": TRIED},
    objection=_object_to_attention,
    last_linear=_last_linear,
)
