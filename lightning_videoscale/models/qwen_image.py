"""Qwen-Image as diffusers has it (`QwenImageTransformer2DModel`): its sizes, split plan and fused forwards.

Text and image are streams of their own and attend together, text first; each has rotary tables, complex ones. Models
for editing modulate the tokens of reference images as at time zero, by an index of each token of the image. What a
ControlNet adds between blocks is of the image's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import joins_text_masks, modulation_method
from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import (
    OF_ADDED,
    Processor,
    attend_jointly,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.dispatched import Dispatched
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.methods import difference, replacement_of
from lightning_videoscale.injection.modulation import Modulation, per_index, per_sample
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, LAYER_NORM, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream, attend_between
from lightning_videoscale.models.flux.fused import clipped
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_HOME = "diffusers.models.transformers.transformer_qwenimage"
_MODEL = f"{_HOME}.QwenImageTransformer2DModel"

# Of text its pipelines take 512 tokens at most, and pad to the longest of a batch only.
GEOMETRIES = {"qwen-image": ModelGeometry(text_tokens=512)}
TRANSFORMERS = {"qwen-image": TransformerFlops(60, 3072, 12288, cross_attention=False)}  # the class's defaults


FLOPS = {_MODEL: partial(TransformerFlops.of_plain, cross_attention=False)}

BLOCKS = {_MODEL: ("transformer_blocks.*",)}

_JOINT, _TEXT = ("text", "video"), ("text",)


def _split_plan(model: nn.Module) -> SplitPlan:
    inputs: dict[str, Mapping[str, Rule]] = {
        "": {"controlnet_block_samples": Split(1)},
        "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1, _TEXT)},
        "transformer_blocks.*": {"encoder_hidden_states_mask": Split(1, _TEXT), "modulate_index": Split(1)},
    }
    if joins_text_masks(model):
        inputs["transformer_blocks.*.attn"] = {"attention_mask": Split(1, _JOINT)}
    return SplitPlan(
        inputs=inputs,
        outputs={"pos_embed": {0: Split(0), 1: Split(0, _TEXT)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={
            "transformer_blocks.*.attn": Attention(
                _JOINT,
                unmasked="video",
                arguments={"encoder_hidden_states_mask": Split(1, _TEXT), "attention_mask": Split(1, _JOINT)},
            )
        },
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

_STREAMS = {
    "text": Projection(
        "encoder_hidden_states",
        **OF_ADDED,
        rotary="image_rotary_emb",
        rotary_part=1,
        layout="complex",
        output="to_add_out",
    ),
    "video": Projection(rotary="image_rotary_emb", rotary_part=0, layout="complex"),
}

PROJECTIONS = {_MODEL: lambda _: {"transformer_blocks.*.attn": _STREAMS}}

_PROCESSOR = Processor(
    class_path=f"{_HOME}.QwenDoubleStreamAttnProcessor2_0",
    known_calls={
        "95b55b819c33baa3-dae665703b51a8583d9021d48d283e113513e28e307f2967eb05504418dbf0515a4bf5bd21f5c6795213e566da8516"
        "f214e883e93": "diffusers 0.42.1",
    },
    norms=(DIFFUSERS_RMS_NORM,),
    helpers={f"{_HOME}.apply_rotary_emb_qwen": "19d41cf727256697-b2b917"},
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    named = dict(cross_attention_kwargs)
    mask, tables = named.pop("encoder_hidden_states_mask", None), named.pop("image_rotary_emb", None)
    detach_bias = named.pop("detach_bias", False)
    others = bool(named) or attention_mask is not None or encoder_hidden_states is None or not _rotates(tables)
    if (original := original_if_changed(self, _PROCESSOR, as_before=others)) is not None:
        return original(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
    assert encoder_hidden_states is not None
    of_image, of_text = (None, None) if tables is None else tables
    streams = [
        projected(self, text := encoder_hidden_states, rope=_rope(of_text, text), rounding="eager", **OF_ADDED),
        projected(self, hidden_states, rope=_rope(of_image, hidden_states), rounding="eager"),
    ]
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(hidden_states.shape[:2])], dim=1)[:, None, None]
    attended = attend_jointly(self, streams, Dispatched(self.processor, mask))
    length = text.shape[1]
    output = project_out(self, attended[:, length:].contiguous(), detach_bias=detach_bias)
    return output, self.to_add_out(attended[:, :length].contiguous())


def _rotates(tables: Any) -> bool:
    """Whether the kernel has the precision of these tables; complex numbers of other widths are diffusers' matter."""
    return tables is None or all(table.dtype is torch.complex64 for table in tables)


def _rope(table: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """A table (S, D/2H) of complex numbers as `qk_norm_rope` takes them."""
    if table is None:
        return None
    if table.ndim != 2 or table.shape[0] != tokens.shape[1]:
        raise ValueError(
            f"A rotary table must be (S, D/2H) for the {tokens.shape[1]} tokens that are rotated; "
            f"got {tuple(table.shape)}."
        )
    return table.real, table.imag


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:
    of_image = _embedded(self.img_mod(temb), hidden_states, modulate_index)
    of_text = _embedded(self.txt_mod(temb.chunk(2)[0] if self.zero_cond_t else temb), encoder_hidden_states)
    image, text = (ResidualStream(self, x, rounding="eager") for x in (hidden_states, encoder_hidden_states))
    attend_between(
        self.attn,
        (image, self.img_norm1, of_image[0]),
        (text, self.txt_norm1, of_text[0]),
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
    )
    image.branch(self.img_mlp, self.img_norm2, of_image[1])
    text.branch(self.txt_mlp, self.txt_norm2, of_text[1])
    return clipped(text.end()), clipped(image.end())


def _embedded(embedded: Tensor, x: Tensor, index: Tensor | None = None) -> list[Modulation]:
    return per_sample(embedded, 2, x.shape[0]) if index is None else per_index(embedded, index, 2, x.shape[0])


def _other_modulation(block: Any) -> str | None:
    """Why the block's own method, which the fused forward does not call, does something else now."""
    if modulation_method() in vars(block):
        return "its _modulate was replaced on the instance"
    replacement = replacement_of(type(block), modulation_method())
    return None if replacement is None else f"its _modulate was replaced by {replacement}"


def _objection(block: Any) -> str | None:
    other = difference(type(block), modulation_method(), _MODULATE)
    return _other_modulation(block) or (None if other is None else f"its _modulate {other}")


_MODULATE = {"e448e93e3457edab-9910d4cf2a76": TRIED}
_BLOCK = FusedBlock(
    class_path=f"{_HOME}.QwenImageTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of image and text",
    known_forwards={
        "852ec44faf70ff4c-7f35dbfae7a9858e5a681e52d0c845b87c40ef898dd53dfbc64536adb1fa80dc47cca226cce2d7": TRIED,
    },
    parts=tuple(Part(name, LAYER_NORM) for name in ("img_norm1", "txt_norm1", "txt_norm2", "img_norm2")),
    change=_other_modulation,
    unless_given="joint_attention_kwargs",
    objection=_objection,
    branches=("attn", "img_mlp", "txt_mlp"),
)
FUSED_BLOCKS = {_BLOCK.class_path: _BLOCK}
FUSED_ATTENTIONS = {_PROCESSOR.class_path: fused_attention(_PROCESSOR, _attend)}
