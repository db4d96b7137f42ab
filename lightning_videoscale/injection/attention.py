"""What fused attentions of diffusers have in common: projections, and norms and rotations of queries and keys.

A family says under ``FUSED_ATTENTIONS`` which attention belongs to a processor, and writes what it computes::

    def _attend(self, hidden_states, ...):
        if (original := original_if_changed(self, _PROCESSOR)) is not None:
            return original(hidden_states, ...)
        video = projected(self, hidden_states, rope=rope_of(image_rotary_emb), rounding="eager")
        attended = attend_jointly(self, [video], Dispatched(self.processor, mask))
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.compat.patching import around_attention, instead_of_attention
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.branch_bias import changed_linear, output_linear, without_bias_gradient
from lightning_videoscale.injection.bypassed import changed
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock, original_forward, unfused
from lightning_videoscale.injection.methods import difference, replacement_of, source_hash_at
from lightning_videoscale.injection.norms import TRIED, of_norm, of_one_dtype
from lightning_videoscale.injection.parts import KnownClass
from lightning_videoscale.kernels import qk_norm_rope, qkv_linear, rope_per_pair
from lightning_videoscale.kernels.autograd import under_autocast
from lightning_videoscale.kernels.head_types import HeadRounding, RopeLayout, wide_dtype
from lightning_videoscale.kernels.recompute import recomputed, run_norm


def rotary_helper(module: str = "diffusers.models.embeddings") -> dict[str, str]:
    """The function by which processors rotate, by where they look it up, with its `source_hash`.

    Args:
        module: Of the processor, if it imports the function by its name; left out where it imports it in each call.
    """
    return {f"{module}.apply_rotary_emb": "480c311aec97a129-50531e"}


Rotary = tuple[Tensor, Tensor] | None
"""cos and sin, an entry for each channel, both members of a pair alike."""

_ATTENTION = "diffusers.models.attention_processor.Attention"
_ATTENTION_FORWARDS = {"f9dff929d786bb32-24ebb2de714548438448f": TRIED}

_PAIRS = (("norm_q", "norm_k"), ("norm_added_q", "norm_added_k"))
_LINEARS = ("to_q", "to_k", "to_v")
OF_ADDED: Mapping[str, Any] = {"linears": ("add_q_proj", "add_k_proj", "add_v_proj"), "norms": _PAIRS[1]}
"""What `projected` takes for the second stream of diffusers' attentions, which has projections of its own."""


@dataclass(frozen=True)
class Processor:
    """A processor of diffusers, whose computation a fused attention knows.

    Attributes:
        class_path: Of it.
        known_calls: `source_hash` of every ``__call__`` that is meant, each with the releases that have it.
        norms: What the norms of queries and keys may be; an attention may also do without.
        helpers: Functions that it calls, by path, each with its `source_hash`.
        pairs: Names of the norms of queries and of keys.
    """

    class_path: str
    known_calls: Mapping[str, str] = field(hash=False)
    norms: tuple[KnownClass, ...]
    helpers: Mapping[str, str] = field(hash=False)
    pairs: tuple[tuple[str, str], ...] = _PAIRS


def fused_attention(
    processor: Processor,
    forward: Callable[..., Any],
    class_path: str = _ATTENTION,
    known_forwards: Mapping[str, str] = _ATTENTION_FORWARDS,
) -> FusedBlock:
    """Returns the replacement of attentions that have a processor.

    Args:
        processor: Theirs.
        forward: The new forward, which asks `original_if_changed` first, attends by `attend_jointly`, and takes
            ``detach_bias``.
        class_path: Of the attention.
        known_forwards: Of it, as `FusedBlock` has them.
    """
    return FusedBlock(
        class_path=class_path,
        forward=forward,
        what="norms and rotation of queries and keys: qk_norm_rope; projections of one input: qkv_linear",
        known_forwards=known_forwards,
        objection=_Objection(processor),
        last_linear=_LastLinear(processor),
        says_where_it_attends=True,
    )


@dataclass(frozen=True)
class _Objection:
    """Why an attention cannot be replaced; no function, so that a pickled block is the same again."""

    processor: Processor

    def __call__(self, attn: Any) -> str | None:
        known = self.processor
        if (change := changed_attention(attn, known)) is not None:
            return change
        if (other := difference(type(attn.processor), "__call__", known.known_calls)) is not None:
            return f"the __call__ of its processor {other}"
        for path, expected in known.helpers.items():
            if source_hash_at(path) != expected:
                return f"{path}, which its processor calls, is not one that the fused forward was written for ({TRIED})"
        for norm in (getattr(attn, name, None) for pair in known.pairs for name in pair):
            kind = next((kind for kind in known.norms if kind.class_path == class_path(type(norm))), None)
            forwards = None if kind is None else kind.known_forwards
            if forwards is not None and (other := difference(type(norm), "forward", forwards)) is not None:
                return f"the forward of its norms {other}"
        return None


@dataclass(frozen=True)
class _LastLinear:
    """The Linear of an attention's ``to_out``, or why its bias stays as it is now."""

    processor: Processor

    def __call__(self, attn: Any) -> nn.Linear | str:
        change = changed_attention(attn, self.processor)
        return output_linear(attn) if change is None else change


def changed_attention(attn: Any, known: Processor) -> str | None:
    """Returns what a fused attention does not call as it was when this was written; None for nothing."""
    cls = type(attn.processor)
    if class_path(cls) != known.class_path:
        return f"its processor is a {class_path(cls)}, not {known.class_path}"
    if (replacement := replacement_of(cls, "__call__")) is not None:
        return f"the __call__ of its processor was replaced by {replacement}"
    if getattr(attn, "fused_projections", False):
        return "its projections were joined by fuse_qkv_projections()"
    for pair in known.pairs:
        if (change := _changed_pair(attn, pair, known.norms)) is not None:
            return change
    return None


def original_if_changed(attn: Any, known: Processor, *, as_before: bool = False) -> Callable[..., Any] | None:
    """Returns the forward to call instead of the fused one, if need be.

    Args:
        attn: The fused attention.
        known: Its processor, as it should be. One that took its place is called as before, without a word.
        as_before: Whether the call is one that the fused forward does not know.
    """
    if as_before or class_path(type(attn.processor)) != known.class_path:
        return original_forward(attn)
    change = changed_attention(attn, known)
    return None if change is None else unfused(attn, change)


class Projected(NamedTuple):
    """A sequence's queries and keys, (B, S, H, D/H), which a function returns, and its values."""

    queries_and_keys: Callable[[], tuple[Tensor, Tensor]]
    values: Tensor


def projected(
    attn: Any, tokens: Tensor, source: Tensor | None = None, *, linears: Sequence[str] = _LINEARS, **how: Any
) -> Projected:
    """Projects a sequence to queries, keys and values, of which the first two are normalised and rotated.

    Args:
        attn: The attention, whose children the names are.
        tokens: (B, S, D), the source of the queries.
        source: (B or 1, T, D), that of keys and values; None: the same.
        linears: Of query, key and value.
        **how: As `normed` takes it by name.
    """
    of_query, of_key, of_value = (getattr(attn, name) for name in linears)
    idle = getattr(attn, how.get("norms", _PAIRS[0])[0], None) is None and how.get("rope") is None
    taken = not idle and changed_linear(of_query) is None and changed_linear(of_key) is None
    if taken and source is None and changed_linear(of_value) is None:
        weights = of_query.weight, of_key.weight, of_value.weight
        biases = _detached(of_query.bias), _detached(of_key.bias), of_value.bias
        projections = qkv_linear(tokens, weights, biases)
    else:
        source = tokens if source is None else source.expand(tokens.shape[0], -1, -1)
        called = without_bias_gradient if taken else nn.Module.__call__
        projections = called(of_query, tokens), called(of_key, source), of_value(source)
    return normed(attn, projections, (of_query.bias, of_key.bias) if taken else (None, None), **how)


def normed(
    attn: Any,
    projections: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    norms: tuple[str, str] = _PAIRS[0],
    per_head: bool = True,
    rounding: HeadRounding = "fp32_once",
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "interleaved",
    start: int = 0,
) -> Projected:
    """Normalises and rotates queries and keys of a sequence that is projected already.

    Args:
        attn: The attention, whose children the norms are.
        projections: Queries, keys and values, (B, S, D) each; at any stride, such as chunks of one projection.
        biases: Of the Linears of the first two, if they were left detached, see `qk_norm_rope`.
        norms: Of query and key.
        per_head: Whether norms are over each head's channels.
        rounding: The law of the eager code, see `qk_norm_rope`. Under autocast, where eager code leaves norms in
            float32 until attention, results are rounded at the end.
        rope: As `qk_norm_rope` has it, an entry for each pair.
        rope_layout: Likewise.
        start: The first rotated token.
    """
    norm_q: Any = getattr(attn, norms[0], None)
    norm_k: Any = getattr(attn, norms[1], None)
    heads: int = getattr(attn, "heads", None) or attn.num_heads
    query, key, value = (x.unflatten(2, (heads, -1)) for x in projections)
    if rope is not None and 2 * rope[0].shape[-1] != query.shape[3]:
        raise ValueError(
            f"The rotary tables have {2 * rope[0].shape[-1]} channels for heads of {query.shape[3]} channels."
        )
    if norm_q is None and rope is None:
        return Projected(lambda: (query, key), value)
    settings: dict[str, Any] = {"norm": "none"}
    if norm_q is not None:
        settings = of_norm(norm_q)
        if settings["eps"] is None:  # torch's default, for the float32 that eager code hands such a norm
            settings["eps"] = torch.finfo(wide_dtype(query)).eps
        settings["q_weight"], settings["k_weight"] = settings.pop("weight"), norm_k.weight
        if settings["norm"] == "layer":
            settings["q_bias"], settings["k_bias"] = settings.pop("bias"), norm_k.bias
        parameters = {name: value for name, value in settings.items() if isinstance(value, Tensor)}
        settings |= zip(parameters, of_one_dtype(query.dtype, [*parameters.values()]), strict=True)
    settings["q_proj_bias"], settings["k_proj_bias"] = biases
    return Projected(
        partial(
            run_norm,
            qk_norm_rope,
            query,
            key,
            per_head=per_head,
            rope=rope,
            rope_layout=rope_layout,
            rope_start=start,
            rounding="at_end" if under_autocast(query) else rounding,
            backend=attn.kernel_backend,
            recompute=attn.recompute_norms,
            **settings,
        ),
        value,
    )


def attend_jointly(
    attn: Any, streams: Sequence[Projected], exchange: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Attends from and to the tokens of all streams, in this order.

    Args:
        attn: The attention.
        streams: One or several.
        exchange: The attention itself, of queries, keys and values (B, S, H, D/H).

    Returns:
        (B, S, D).
    """

    def queries_and_keys() -> tuple[Tensor, Tensor]:
        found = [stream.queries_and_keys() for stream in streams]
        return _joined([q for q, _ in found]), _joined([k for _, k in found])

    query, key = queries_and_keys()
    with recomputed((query, key), queries_and_keys, recompute=attn.recompute_norms):
        value = _joined([stream.values for stream in streams])
        attend: Callable[..., Tensor] | None = instead_of_attention(attn)
        if attend is not None and isinstance(exchange, Dispatched) and exchange.is_torchs:
            attended = attend(query, key, value, exchange.mask)
        else:
            with around_attention(attn):
                attended = exchange(query, key, value)
        return attended.flatten(2).to(query.dtype)


def project_out(attn: Any, attended: Tensor, *, detach_bias: bool) -> Tensor:
    """The projection behind an attention, ``to_out``, of which the caller may take the bias gradient."""
    linear, dropout = attn.to_out
    if detach_bias:
        return without_bias_gradient(linear, attended)
    output: Tensor = dropout(linear(attended))
    return output


def attended_by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """The attention of torch; (B, S, H, D/H) in and out.

    Args:
        query: (B, S, H, D/H).
        key: (B, T, H, D/H).
        value: Likewise.
        mask: As torch's attention takes it, or None.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.0, is_causal=False).transpose(1, 2)


def rope_of(tables: Rotary, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Tables (S, D/H) as `qk_norm_rope` takes them.

    Args:
        tables: Of each of the tokens, or None.
        tokens: (B, S, D).

    Raises:
        ValueError: If they are not as many.
    """
    if tables is None:
        return None
    cos, sin = (table.to(tokens.device) for table in tables)
    if cos.ndim != 2 or cos.shape[0] != tokens.shape[1]:
        raise ValueError(
            f"Rotary tables must be (S, D/H) for the {tokens.shape[1]} tokens that are rotated; got {tuple(cos.shape)}."
        )
    return rope_per_pair(cos, sin, "interleaved")


def expanded_mask(attn: Any, mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """A mask as diffusers' processors have it made for ``tokens``, (B, T, …): (B, H, 1 or S, T)."""
    if mask is None:
        return None
    batch_size, length = tokens.shape[:2]
    mask = attn.prepare_attention_mask(mask, length, batch_size)
    return mask.view(batch_size, attn.heads, -1, mask.shape[-1])


def _changed_pair(attn: Any, names: tuple[str, str], kinds: tuple[KnownClass, ...]) -> str | None:
    norm_q: Any = getattr(attn, names[0], None)
    norm_k: Any = getattr(attn, names[1], None)
    if norm_q is None and norm_k is None:
        return None
    for name, norm in zip(names, (norm_q, norm_k), strict=True):
        path = class_path(type(norm))
        kind = next((kind for kind in kinds if kind.class_path == path), None)
        if kind is None:
            return f"{name} is not {' or '.join(kind.name for kind in kinds)}, but {path}"
        change = kind.misfit(norm)
        if change is None:
            change = changed(norm)
        if change is not None:
            return f"{name} {change}"
    if norm_q.eps != norm_k.eps or (norm_q.weight is None) != (norm_k.weight is None):
        return f"{' and '.join(names)} differ in their eps, or one of them has no weight"
    return None


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
