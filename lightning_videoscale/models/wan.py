"""Wan 2.1, 2.2 and TI2V as diffusers has them (`WanTransformer3DModel`).

Sizes, the attention, the split plan, and the fused forwards: of the attention, of the block, and of the embedding of
timesteps that repeat over tokens. The residual stream and the norms are rounded where diffusers rounds them, so on the
reference backend the fused forward gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import dispatch_settings
from lightning_videoscale.compat.torch.versions import autocast_widens_norms
from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.branch_bias import apply_detached, branch_and_bias, changed_linear, output_linear
from lightning_videoscale.injection.bypassed import changed, has_readers, unfused
from lightning_videoscale.injection.fused_block import FusedBlock, fused_block_of, original_forward
from lightning_videoscale.injection.methods import difference, replacement_of
from lightning_videoscale.injection.modulation import GroupedModulation, find_repeated, modulations
from lightning_videoscale.kernels import (
    fork_norm_modulate,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
    qk_norm_rope,
    qkv_linear,
)
from lightning_videoscale.kernels.recompute import recomputed, run_norm
from lightning_videoscale.parallel import (
    SequenceContext,
    Split,
    SplitPlan,
    check_heads,
    sequence_parallel_attention,
)
from lightning_videoscale.undo import Undo

_MODULE = "diffusers.models.transformers.transformer_wan"
_MODEL = f"{_MODULE}.WanTransformer3DModel"
_TRIED = "diffusers 0.37 to 0.42.1"

# Sizes.

GEOMETRIES = {
    "wan2.1": ModelGeometry(),
    "wan2.2": ModelGeometry(),
    "wan2.2-ti2v-5b": ModelGeometry(spatial_stride=16),
}

TRANSFORMERS = {
    "wan2.1-1.3b": TransformerFlops(30, 1536, 8960),
    "wan2.1-14b": TransformerFlops(40, 5120, 13824),
    "wan2.2-ti2v-5b": TransformerFlops(30, 3072, 14336),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    return TransformerFlops(
        config["num_layers"], config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    )


FLOPS = {_MODEL: _flops}

# Attention.

_PROCESSOR_CALLS = {"a929a3b19d975b4a-d0809db7024d1246955b54dcd01f473628721b545eed6ab5aa2e1644c": _TRIED}
_AUTOCAST_WIDENS_NORMS = autocast_widens_norms()  # q and k stay in float32 until attention
_TEXT_TOKENS = 512  # behind the tokens of the image, as diffusers takes for granted

_Rotary = tuple[Tensor, Tensor] | None
"""cos and sin, (1, S, 1, D/H), both members of a pair alike."""

_Exchange = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attends from queries (B, S, H, D/H) to keys and values, with a mask or None; (B, S, H, D/H)."""


def _attend(
    attn: Any,
    hidden_states: Tensor,
    context: Tensor | None,
    mask: Tensor | None,
    rotary_emb: _Rotary,
    exchange: _Exchange,
    *,
    fused: bool,
    detach_bias: bool,
) -> Tensor:
    """What diffusers' ``WanAttnProcessor`` computes, around any exchange.

    Wan's query and key norms span all heads, hence norms and rotation come before the exchange.

    Args:
        attn: diffusers' ``WanAttention``, its projections fused or not.
        hidden_states: (B, S, D), the source of the queries.
        context: (B, T, D), the source of keys and values in cross-attention; None in self-attention.
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
    output: Tensor = apply_detached(projection, attended) if detach_bias else dropout(projection(attended))
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
        return apply_detached(attn.to_q, hidden_states), apply_detached(attn.to_k, source), attn.to_v(source)
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
    attn: Any, query: Tensor, key: Tensor, rotary_emb: _Rotary, *, detached_biases: bool
) -> tuple[Tensor, Tensor]:
    """Normalises query and key over all heads and rotates them; from (B, S, D) to (B, S, H, D/H)."""
    rope, biases = None, {}
    if detached_biases:
        biases = {"q_proj_bias": attn.to_q.bias, "k_proj_bias": attn.to_k.bias}
    if rotary_emb is not None:
        cos, sin = rotary_emb
        rope = cos[..., 0::2], sin[..., 1::2]
    heads = (attn.heads, -1)
    widened = _AUTOCAST_WIDENS_NORMS and query.is_cuda and torch.is_autocast_enabled("cuda")
    normed: tuple[Tensor, Tensor] = run_norm(
        qk_norm_rope,
        query.unflatten(-1, heads),
        key.unflatten(-1, heads),
        attn.norm_q.weight,
        attn.norm_k.weight,
        **biases,
        eps=attn.norm_q.eps,
        rope=rope,
        rounding="at_end" if widened else "fp32_once",
        backend=attn.kernel_backend,
        recompute=attn.recompute_norms,
    )
    return normed


def _norms(attn: Any, query: Tensor, key: Tensor, rotary_emb: _Rotary) -> tuple[Tensor, Tensor]:
    """What `_fused_norms` computes, operation by operation."""
    query, key = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key)))
    return (query, key) if rotary_emb is None else (_rotated(query, *rotary_emb), _rotated(key, *rotary_emb))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on interleaved pairs, rounded once to x's dtype."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def _foreign(processor: Any) -> str | None:
    """Returns what a processor is where it is not diffusers' own, as diffusers wrote it."""
    cls = type(processor)
    if class_path(cls) != f"{_MODULE}.WanAttnProcessor":
        return f"a {class_path(cls)}"
    replacement = replacement_of(cls, "__call__")
    return None if replacement is None else f"a WanAttnProcessor whose __call__ was replaced by {replacement}"


# Split. Cross-attention reads text (and image) tokens that every rank holds whole, so nothing is exchanged there.


class SequenceParallelWanAttention:
    """Attention processor for the self-attention of a Wan block whose hidden states are split.

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
        rotary_emb: _Rotary = None,
        detach_bias: bool = False,
    ) -> Tensor:
        """Attends from and to all tokens of the group; (B, s, dim) in and out."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("Sequence-parallel Wan self-attention takes neither other tokens nor an attention mask.")
        fused = fused_block_of(attn) is _FUSED_ATTENTION and _changed_attention(attn) is None
        return _attend(
            attn, hidden_states, None, None, rotary_emb, self._exchange, fused=fused, detach_bias=detach_bias
        )

    def _exchange(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
        lengths, transport = self.context.lengths(), self.context.transport
        return sequence_parallel_attention(query, key, value, self.context.mesh, lengths=lengths, transport=transport)


def _split_attention(model: nn.Module, context: SequenceContext) -> Undo:
    layers: list[Any] = [block.attn1 for block in model.get_submodule("blocks").children()]
    for layer in layers:
        check_heads(layer.heads, context.mesh.ulysses.size)
        if (other := _foreign(layer.processor)) is not None:
            raise ValueError(
                f"The model's self-attention has the processor {type(layer.processor).__name__}, {other}, whose "
                "computation is unknown here; sequence parallelism replaces only diffusers' own WanAttnProcessor."
            )
    undo = Undo()
    for layer in layers:
        undo.add(partial(layer.set_processor, layer.processor))
        layer.set_processor(SequenceParallelWanAttention(context))
    return undo


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {"timestep": Split(1, ndim=2)}, "blocks.0": {"hidden_states": Split(1)}},
        outputs={"rope": {0: Split(1), 1: Split(1)}},
        gathers={"proj_out": {0: Split(1)}},
        attention=_split_attention,
    )


SPLIT_PLANS = {_MODEL: _split_plan}

# Fused: the attention, whose exchange stays diffusers' own choice.


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    rotary_emb: _Rotary = None,
    **kwargs: Any,
) -> Tensor:
    """The fused forward; a processor that took the place of diffusers' own is called as before."""
    change = _changed_attention(self)
    if change is not None or _foreign(self.processor) is not None or kwargs.keys() - {"detach_bias"}:
        original = original_forward(self) if change is None else unfused(self, change)
        unchanged: Tensor = original(hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        return unchanged
    exchange = partial(_dispatch, self.processor, encoder_hidden_states is None)
    detach_bias = kwargs.get("detach_bias", False)
    inputs = hidden_states, encoder_hidden_states, attention_mask, rotary_emb
    return _attend(self, *inputs, exchange, fused=True, detach_bias=detach_bias)


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
    if (change := _changed_attention(attn)) is not None:
        return change
    other = _foreign(attn.processor)
    if other is not None and not getattr(attn.processor, "detaches_bias", False):
        return f"its processor is {other}"
    return output_linear(attn)


def _object_to_attention(attn: nn.Module) -> str | None:
    processor: Any = attn.processor
    if (other := _foreign(processor)) is not None:
        return f"its processor is {other}, not diffusers' WanAttnProcessor as known here"
    if (other := difference(type(processor), "__call__", _PROCESSOR_CALLS)) is not None:
        return f"the __call__ of its processor {other}"
    return _changed_attention(attn)


def _changed_attention(attn: Any) -> str | None:
    """Returns which norm is not as diffusers makes it, since the fused forward calls none; None if all are."""
    for name, norm in (("norm_q", attn.norm_q), ("norm_k", attn.norm_k)):
        if type(norm) is not torch.nn.RMSNorm or norm.eps is None or norm.weight is None:
            return f"{name} is not a RMSNorm with a weight and an eps, as known here, but {class_path(type(norm))}"
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
    return "norm_q and norm_k have different eps" if attn.norm_q.eps != attn.norm_k.eps else None


_FUSED_ATTENTION = FusedBlock(
    class_path=f"{_MODULE}.WanAttention",
    forward=_attention_forward,
    what="norm_q, norm_k and the rotary embedding: qk_norm_rope; to_q, to_k and to_v of one input: qkv_linear",
    known_forwards={"46c9d3f08be4d196-eb6a2e": _TRIED},
    objection=_object_to_attention,
    last_linear=_last_linear,
)

# Fused: the block's norms and gates.

_FP32_LAYER_NORM = "diffusers.models.normalization.FP32LayerNorm"
_FP32_LAYER_NORM_FORWARDS = {"4b00d355c071d03e-bd14f7415": _TRIED}


def _block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | GroupedModulation,
    rotary_emb: Any,
) -> Tensor:
    """The fused forward; parameters and result are those of diffusers' ``WanTransformerBlock.forward``.

    h is what it is after the last residual, y the norm of that. y is recomputed from h, which is kept anyway.
    """
    if (change := _changed_block(self)) is not None:
        per_token = temb.per_token() if isinstance(temb, GroupedModulation) else temb
        unchanged: Tensor = unfused(self, change)(hidden_states, encoder_hidden_states, per_token, rotary_emb)
        return unchanged
    attention, feed_forward = modulations(self.scale_shift_table, temb, hidden_states.shape[0])
    backend, recompute = self.kernel_backend, self.recompute_norms
    norm1 = attention.of_norm() | {"eps": self.norm1.eps, "backend": backend}
    norm3 = feed_forward.of_norm() | {"eps": self.norm3.eps, "backend": backend}

    hidden_states, y = run_norm(fork_norm_modulate, hidden_states, **norm1, recompute=recompute)
    with recomputed(y, partial(norm_modulate, hidden_states, **norm1), recompute=recompute):
        branch, bias = branch_and_bias(self.attn1, y, None, None, rotary_emb)

    gate = attention.of_gate() | {"branch_bias": bias}
    if isinstance(self.norm2, nn.Identity):
        h = gate_residual(hidden_states, branch, **gate, backend=backend)
        branch, bias = branch_and_bias(self.attn2, h, encoder_hidden_states, None, None)
    else:
        norm2 = {"weight": self.norm2.weight, "bias": self.norm2.bias, "eps": self.norm2.eps, "backend": backend}
        h, y = run_norm(gate_residual_norm_modulate, hidden_states, branch, **gate, **norm2, recompute=recompute)
        with recomputed(y, partial(norm_modulate, h, **norm2), recompute=recompute):
            branch, bias = branch_and_bias(self.attn2, y, encoder_hidden_states, None, None)

    h, y = run_norm(gate_residual_norm_modulate, h, branch, **norm3, branch_bias=bias, recompute=recompute)
    with recomputed(y, partial(norm_modulate, h, **norm3), recompute=recompute):
        branch, bias = branch_and_bias(self.ffn, y)
    return gate_residual(h, branch, **feed_forward.of_gate(), branch_bias=bias, backend=backend)


def _object_to_block(block: nn.Module) -> str | None:
    """The fused forward computes the norms itself, hence they must be what it takes them for."""
    if (change := _changed_block(block)) is not None:
        return change
    other = difference(type(block.get_submodule("norm1")), "forward", _FP32_LAYER_NORM_FORWARDS)
    return None if other is None else f"the forward of its norms {other}"


def _changed_block(block: Any) -> str | None:
    """Returns which norm is not as diffusers makes it, since the fused forward calls none; None if all are."""
    for name, norm, affine in (
        ("norm1", block.norm1, False),
        ("norm2", block.norm2, True),
        ("norm3", block.norm3, False),
    ):
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
        if affine and type(norm) is nn.Identity:
            continue
        if class_path(type(norm)) != _FP32_LAYER_NORM or (norm.weight is not None) is not affine:
            kind = "with" if affine else "without"
            return f"{name} is not diffusers' FP32LayerNorm {kind} an affine part, but {class_path(type(norm))}"
    return None


_FUSED_BLOCK = FusedBlock(
    class_path=f"{_MODULE}.WanTransformerBlock",
    forward=_block_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate (2), gate_residual",
    known_forwards={"4da7200f9dd6c573-39b49f67eedbb96b67833e6f5b8584d1b44c": _TRIED},
    objection=_object_to_block,
    branches=("attn1", "attn2", "ffn"),
)

# Timesteps per token (TI2V), of which many are the same: those of a clip's given frame are 0, all others share one. Yet
# diffusers projects every token's to a modulation of 6·D channels. Here the U different ones are embedded once each and
# fused blocks read by index which one a token has, so that (B, S, 6, D) never exists.


def _timesteps_forward(
    self: Any,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_image: Tensor | None = None,
    timestep_seq_len: int | None = None,
) -> tuple[Tensor, Tensor | GroupedModulation, Tensor, Tensor | None]:
    """The fused forward; the embedding of each token, for the model's head, is gathered, its modulation is not."""
    embed = original_forward(self)
    repeated = find_repeated(timestep, timestep_seq_len)
    if repeated is not None and has_readers(self):
        embed, repeated = unfused(self, "has hooks, which expect the modulation of every token"), None
    if repeated is None:
        embedded: Any = embed(timestep, encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len)
    else:
        temb, modulation, *contexts = embed(repeated.values, encoder_hidden_states, encoder_hidden_states_image, None)
        embedded = temb[repeated.which], GroupedModulation(modulation, repeated.which), *contexts
    return embedded  # type: ignore[no-any-return]


_FUSED_TIMESTEPS = FusedBlock(
    class_path=f"{_MODULE}.WanTimeTextImageEmbedding",
    forward=_timesteps_forward,
    what="timesteps that repeat over tokens are embedded once",
    known_forwards={"f9556c0f8bd6d661-b48c8d1f69195f4a30de2726444f5b": _TRIED},
    only_with=_FUSED_BLOCK.class_path,
)

FUSED_BLOCKS = {block.class_path: block for block in (_FUSED_BLOCK, _FUSED_ATTENTION, _FUSED_TIMESTEPS)}
