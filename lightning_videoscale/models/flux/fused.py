"""The fused blocks and attention of Flux.1, the attention of its kin, too.

All is rounded after every operation, as diffusers' code does. The rotary tables cover text and image, text first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.diffusers import projection_functions
from lightning_videoscale.injection.attention import (
    OF_ADDED,
    Processor,
    Rotary,
    attend_jointly,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
    rope_of,
    rotary_helper,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, of_adaptive_norm
from lightning_videoscale.injection.norms import (
    ADA_LAYER_NORM_ZERO,
    ADA_LAYER_NORM_ZERO_SINGLE,
    LAYER_NORM,
    RMS_NORM,
    TRIED,
)
from lightning_videoscale.injection.parts import KnownClass, Part
from lightning_videoscale.injection.residual_stream import ResidualStream, attend_between
from lightning_videoscale.injection.side_by_side import side_by_side

_HOME = "diffusers.models.transformers.transformer_flux"


def projection_helpers(module: str) -> dict[str, str]:
    """The functions by which a module of Flux's models makes queries, keys and values, each with its `source_hash`."""
    hashes = "188565caf5c0adff-57e5eb3cf", "8fa10229a8e44bd5-aa2a03d78f539821821ec"
    return dict(zip(projection_functions(module), hashes, strict=True))


_PROCESSOR = Processor(
    class_path=f"{_HOME}.FluxAttnProcessor",
    known_calls={
        "d0d655b66b73402c-240c7102fd8c2c4124695e99a518e745e7f7d48": "diffusers 0.37",
        "b88fc1f181bd6ebb-240c715240bdb141246951f4a518e745e7f7d48": "diffusers 0.42.1",
    },
    norms=(RMS_NORM,),
    helpers=rotary_helper(_HOME) | projection_helpers(_HOME),
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Any:
    others = bool(kwargs.keys() - {"detach_bias"})
    mixed = (encoder_hidden_states is None) != (self.added_kv_proj_dim is None)
    if (original := original_if_changed(self, _PROCESSOR, as_before=others or mixed)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs)
    exchange = Dispatched(self.processor, attention_mask)
    if encoder_hidden_states is None:
        return attend_jointly(
            self, [projected(self, hidden_states, rope=rope_of(image_rotary_emb, hidden_states))], exchange
        )
    detach_bias = kwargs.get("detach_bias", False)
    return attend_to_both(
        self, hidden_states, encoder_hidden_states, image_rotary_emb, exchange, detach_bias=detach_bias
    )


def attend_to_both(
    attn: Any,
    image: Tensor,
    text: Tensor,
    tables: Rotary,
    exchange: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    detach_bias: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attends over image (B, S, D) and text (B, T, D), whose tables come first; returns the branch of each."""
    length = text.shape[1]
    of_text = of_image = None
    if tables is not None:
        of_text = rope_of(tuple(table[:length] for table in tables), text)  # type: ignore[arg-type]
        of_image = rope_of(tuple(table[length:] for table in tables), image)  # type: ignore[arg-type]
    streams = [projected(attn, text, rope=of_text, **OF_ADDED), projected(attn, image, rope=of_image)]
    attended = attend_jointly(attn, streams, exchange)
    output = project_out(attn, attended[:, length:].contiguous(), detach_bias=detach_bias)
    return output, attn.to_add_out(attended[:, :length].contiguous())


def _double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    batch_size = hidden_states.shape[0]
    of_image = of_adaptive_norm(self.norm1, temb, 2, batch_size)
    of_text = of_adaptive_norm(self.norm1_context, temb, 2, batch_size)
    return two_streams(self, hidden_states, encoder_hidden_states, of_image, of_text, image_rotary_emb=image_rotary_emb)


def _single(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    length = encoder_hidden_states.shape[1]
    joined = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    (modulation,) = of_adaptive_norm(self.norm, temb, 1, joined.shape[0])
    attend = partial(attended, self.attn, image_rotary_emb=image_rotary_emb)
    joined = clipped(side_by_side(self, modulation, joined, attend))
    return joined[:, :length], joined[:, length:]


def two_streams(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    of_image: list[Modulation],
    of_text: list[Modulation],
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """Runs a block of two streams, image (B, S, D) and text (B, T, D); returns text and image."""
    image, text = (ResidualStream(block, x, rounding="eager") for x in (hidden_states, encoder_hidden_states))
    norm, of_context = (getattr(each, "norm", each) for each in (block.norm1, block.norm1_context))  # in adaptive ones
    attend_between(block.attn, (image, norm, of_image[0]), (text, of_context, of_text[0]), **named)
    image.branch(block.ff, block.norm2, of_image[1])
    text.branch(block.ff_context, block.norm2_context, of_text[1])
    return clipped(text.end()), image.end()


def clipped(x: Tensor) -> Tensor:
    """The stream as diffusers hands it on: in float16, infinity becomes the largest number."""
    return x.clip(-65504, 65504) if x.dtype is torch.float16 else x


def attended(attn: Any, y: Tensor, **named: Any) -> Tensor:
    """What the attention of a block of one stream makes of y, (B, S, D)."""
    output: Tensor = attn(hidden_states=y, **named)
    return output


def double_block(class_path: str, forward: Any, known: str, norm: KnownClass) -> FusedBlock:
    """Returns the replacement of blocks of two streams."""
    return FusedBlock(
        class_path=class_path,
        forward=forward,
        what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of image and text",
        known_forwards={known: TRIED},
        unless_given="joint_attention_kwargs",
        parts=(
            Part("norm1", norm),
            Part("norm1.norm", LAYER_NORM),
            Part("norm1_context", norm),
            Part("norm1_context.norm", LAYER_NORM),
            Part("norm2", LAYER_NORM),
            Part("norm2_context", LAYER_NORM),
        ),
        branches=("attn", "ff", "ff_context"),
    )


def single_block(class_path: str, forward: Any, known: str, norm: KnownClass) -> FusedBlock:
    """Returns the replacement of blocks of one stream."""
    return FusedBlock(
        class_path=class_path,
        forward=forward,
        what="fork_norm_modulate, gate_residual; gelu",
        known_forwards={known: TRIED},
        unless_given="joint_attention_kwargs",
        parts=(Part("norm", norm), Part("norm.norm", LAYER_NORM)),
    )


_BLOCKS = (
    double_block(
        f"{_HOME}.FluxTransformerBlock",
        _double,
        "9773ffdd1c71388d-76e29a85eb87b2ad9abb1e6f6a91741b491f29436eb59aa96c02ab95806c2262d7",
        ADA_LAYER_NORM_ZERO,
    ),
    single_block(
        f"{_HOME}.FluxSingleTransformerBlock",
        _single,
        "25989a7ae5bd811c-76e1030e393a2757ddb87301420e4bb382e5ccecfd2d7",
        ADA_LAYER_NORM_ZERO_SINGLE,
    ),
)
FUSED_BLOCKS = {block.class_path: block for block in _BLOCKS}
FUSED_ATTENTIONS = {
    _PROCESSOR.class_path: fused_attention(
        _PROCESSOR, _attend, f"{_HOME}.FluxAttention", {"4732cbebfd3e04d0-189bb2de7e9919bc6c9fa": TRIED}
    )
}
