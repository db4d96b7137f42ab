"""The fused forward of Wan's attention, and of its copies; the exchange stays diffusers' own choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import projection_functions_of_wan
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.branch_bias import output_linear
from lightning_videoscale.injection.bypassed import changed
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock, original_forward, unfused
from lightning_videoscale.injection.methods import difference, replacement_of, source_hash_at
from lightning_videoscale.injection.norms import TRIED
from lightning_videoscale.models.wan.attention import ExchangingAttention, WanRotary, attend

_HOME = "diffusers.models.transformers"
MODULE = f"{_HOME}.transformer_wan"
CHRONOEDIT = f"{_HOME}.transformer_chronoedit"
ANIMATE = f"{_HOME}.transformer_wan_animate"
SKYREELS_V2 = f"{_HOME}.transformer_skyreels_v2"

_ALL_PARALLEL = f"{SKYREELS_V2}.SkyReelsV2AttnProcessor"  # hands diffusers' parallelism on in cross-attention, too
_CALLS = {"a929a3b19d975b4a-d0809db7024d1246955b54dcd01f473628721b545eed6ab5aa2e1644c": TRIED}
_PROCESSORS = {f"{home}.WanAttnProcessor": _CALLS for home in (MODULE, CHRONOEDIT, ANIMATE)} | {
    _ALL_PARALLEL: {"517dc8df1aa9e2da-d0809db7024d1246955b54dcd01f47362f146b445eed6ab5aa2e1644c": TRIED}
}
_PROJECTIONS = (
    {"9f8c7d0f1fcdbf6d-163f197e6547", "798b5212476a832a-163f196b4547"},  # the second is SkyReels'
    {"400fafa963e490da-d8a831adf"},
)
"""`source_hash` of `projection_functions_of_wan`, in diffusers 0.37 to 0.42.1."""


def foreign(processor: Any) -> str | None:
    """Returns what a processor is where it is not diffusers' own, as diffusers wrote it."""
    cls = type(processor)
    if class_path(cls) not in _PROCESSORS:
        return f"a {class_path(cls)}"
    replacement = replacement_of(cls, "__call__")
    return None if replacement is None else f"a {cls.__name__} whose __call__ was replaced by {replacement}"


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: WanRotary = None,
    **kwargs: Any,
) -> Tensor:
    """The fused forward; a processor that took the place of diffusers' own is called as before."""
    change = changed_attention(self)
    inputs = hidden_states, encoder_hidden_states, attention_mask, rotary_emb
    exchange = None
    if change is None and not kwargs.keys() - {"detach_bias"}:
        exchange = _exchange(self.processor, self, hidden_states, to_text=encoder_hidden_states is not None)
    if exchange is None:
        original = original_forward(self) if change is None else unfused(self, change)
        unchanged: Tensor = original(*inputs, **kwargs)
        return unchanged
    return attend(self, *inputs, exchange, fused=True, detach_bias=kwargs.get("detach_bias", False))


def _exchange(processor: Any, attn: Any, hidden_states: Tensor, *, to_text: bool) -> ExchangingAttention | None:
    """What attends behind projections, norms and rotations; None where the processor does more than that."""
    if foreign(processor) is None:
        return partial(_dispatch, processor, not to_text)
    ours = None if to_text else getattr(processor, "exchange_of", None)
    return None if ours is None else ours(attn, hidden_states)


def _dispatch(processor: Any, own: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """``own``: self-attention; that to tokens which every rank of diffusers' parallelism holds is not its concern."""
    parallel = own or class_path(type(processor)) == _ALL_PARALLEL
    return Dispatched(processor, mask, parallel)(query, key, value)


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
    if (other := difference(type(processor), "__call__", _PROCESSORS[class_path(type(processor))])) is not None:
        return f"the __call__ of its processor {other}"
    for path, known in zip(projection_functions_of_wan(type(processor).__module__), _PROJECTIONS, strict=True):
        if source_hash_at(path) not in known:
            return f"{path}, which its processor calls, is not one that the fused forward was written for ({TRIED})"
    return changed_attention(attn)


def changed_attention(attn: Any) -> str | None:
    """Returns which norm is not as diffusers makes it, since the fused forward calls none; None if all are."""
    for name, norm in (("norm_q", attn.norm_q), ("norm_k", attn.norm_k)):
        if type(norm) is not torch.nn.RMSNorm or norm.eps is None or norm.weight is None:
            return f"{name} is not a RMSNorm with a weight and an eps, as known here, but {class_path(type(norm))}"
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
    return "norm_q and norm_k have different eps" if attn.norm_q.eps != attn.norm_k.eps else None


def fused_attention(class_path: str) -> FusedBlock:
    """Returns the replacement of an attention that is Wan's, whatever its class is called."""
    return FusedBlock(
        class_path=class_path,
        forward=_attention_forward,
        what="norm_q, norm_k and the rotary embedding: qk_norm_rope; to_q, to_k and to_v of one input: qkv_linear",
        known_forwards={"46c9d3f08be4d196-eb6a2e": TRIED},
        objection=_object_to_attention,
        last_linear=_last_linear,
    )


FUSED_ATTENTION = fused_attention(f"{MODULE}.WanAttention")
