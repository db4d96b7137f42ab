"""Chroma as diffusers has it (`ChromaTransformer2DModel`): its sizes, split plan and fused forwards.

It is Flux with a network that makes all modulation, and a mask of text and image. A masked token is padding: it is no
key and, as a query, attends to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.modulation import Modulation, per_sample
from lightning_videoscale.injection.norms import TRIED, without_labels
from lightning_videoscale.injection.parts import KnownClass
from lightning_videoscale.injection.side_by_side import side_by_side
from lightning_videoscale.models.flux.fused import (
    attended,
    clipped,
    double_block,
    single_block,
    two_streams,
)
from lightning_videoscale.models.flux.split import (
    CONTROL,
    DOUBLE,
    JOINT,
    OF_BLOCKS,
    SINGLE,
    TOKENS,
    joint_attention,
)
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Split, SplitPlan

_HOME = "diffusers.models.transformers.transformer_chroma"
_MODEL = f"{_HOME}.ChromaTransformer2DModel"

GEOMETRIES = {"chroma": ModelGeometry(temporal_stride=1, text_tokens=512)}  # images alone; text as the pipelines pad it
TRANSFORMERS = {"chroma": TransformerFlops(19 + 38, 3072, 12288, cross_attention=False)}  # the class's defaults
# Of the blocks: what makes the modulation is left out, as it works once a sample.
FLOPS = {_MODEL: TransformerFlops.from_config}

BLOCKS = {_MODEL: (f"{DOUBLE}.*", f"{SINGLE}.*")}


def _biased(_: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    mask = arguments.get("attention_mask")
    if mask is None or mask.dtype is torch.bool:
        return None
    return (
        f"attention_mask is {mask.dtype}, as diffusers' pipeline makes it, and is then added to the logits instead of "
        "hiding padding. Give it as bool: attention_mask.bool()."
    )


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {**TOKENS, **CONTROL, "attention_mask": Split(1, JOINT)}},
        outputs={},
        gathers={"proj_out": {0: Split(1)}},
        attention=joint_attention(model, padded_rows=True),
        objection=_biased,
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

PROJECTIONS = {_MODEL: lambda _: OF_BLOCKS}


def _double(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    of_image, of_text = (_modulations(part, 2, hidden_states) for part in (temb[:, :6], temb[:, 6:]))
    named = {"image_rotary_emb": image_rotary_emb, "attention_mask": _both_count(attention_mask)}
    return two_streams(self, hidden_states, encoder_hidden_states, of_image, of_text, **named)


def _single(
    self: Any,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    (modulation,) = _modulations(temb, 1, hidden_states)
    mask = _both_count(attention_mask)
    attend = partial(attended, self.attn, image_rotary_emb=image_rotary_emb, attention_mask=mask)
    return clipped(side_by_side(self, modulation, hidden_states, attend))


def _modulations(temb: Tensor, branches: int, x: Tensor) -> list[Modulation]:
    """Of (B, 3 · branches, D): shift, scale and gate of each branch in turn."""
    return per_sample(temb.flatten(1), branches, x.shape[0])


def _both_count(mask: Tensor | None) -> Tensor | None:
    """From tokens (B, S) that count to pairs of them, (B, 1, S, S)."""
    return None if mask is None else mask[:, None, None, :] * mask[:, None, :, None]


_BLOCKS = (
    double_block(
        f"{_HOME}.ChromaTransformerBlock",
        _double,
        "b089ae3c11045e6b-65ba4284e387b87581be3d9abb1e6f6a91741b491f29436eb59aa96c02ab95806c2262d7",
        KnownClass(
            f"{_HOME}.ChromaAdaLayerNormZeroPruned",
            "diffusers' ChromaAdaLayerNormZeroPruned",
            {"aec7701c4e6f313a-5dd4a3968a29db4": TRIED},
            without_labels,
        ),
    ),
    single_block(
        f"{_HOME}.ChromaSingleTransformerBlock",
        _single,
        "9b0e6f398d37576d-55693a2757ddb87581fd7420e4bb382e5cce44c",
        KnownClass(
            f"{_HOME}.ChromaAdaLayerNormZeroSinglePruned",
            "diffusers' ChromaAdaLayerNormZeroSinglePruned",
            {"ddd3606cca57ca96-cb0625a29701": TRIED},
        ),
    ),
)
FUSED_BLOCKS = {block.class_path: block for block in _BLOCKS}
