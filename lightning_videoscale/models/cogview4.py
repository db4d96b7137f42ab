"""CogView4 as diffusers has it (`CogView4Transformer2DModel`).

Text and the image's tokens are streams of their own and attend together, text first. Masks are refused: the default
processor adds 1 to what counts instead of taking the rest out, and the one for training packs samples, each with its
own length.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Refused, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_cogview4.CogView4Transformer2DModel"

GEOMETRIES = {"cogview4": ModelGeometry(temporal_stride=1, text_tokens=1024)}  # the most that the pipeline takes
# Layers and heads as in diffusers' scripts/convert_cogview4_to_diffusers.py.
TRANSFORMERS = {"cogview4-6b": TransformerFlops(28, 4096, 16384, cross_attention=False)}


FLOPS = {_MODEL: partial(TransformerFlops.of_plain, cross_attention=False)}
BLOCKS = {_MODEL: ("transformer_blocks.*",)}


_MASK = Refused(
    "CogView4's processor makes of it a bias of 1 and 0, which takes no key out. Call it without, with texts of one "
    "length."
)


def _packed(_: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    packing = sorted({*(arguments.get("attention_kwargs") or ())} - {"scale"})
    if packing:
        return f"attention_kwargs have {packing}, by which samples are packed. Call it with samples of one length."
    return None


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            "": {"image_rotary_emb": Split(0), "attention_mask": _MASK},
            "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1, ("text",))},
        },
        outputs={"rope": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn1": Attention(("text", "video"))},
        objection=_packed,
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

_STREAMS = {"text": Projection("encoder_hidden_states"), "video": Projection(rotary="image_rotary_emb", halves=True)}
PROJECTIONS = {_MODEL: lambda _: {"transformer_blocks.*.attn1": _STREAMS}}
