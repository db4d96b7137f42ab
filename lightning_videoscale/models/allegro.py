"""Allegro as diffusers has it (`AllegroTransformer3DModel`).

Text enters by cross-attention and stays whole. Of its rotary embedding, which its caller makes, the tables are by
frame, row and column and stay whole, and the positions of tokens in them are split. Masks of the video are refused, as
diffusers repeats them for each head.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Refused, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_allegro.AllegroTransformer3DModel"

GEOMETRIES = {"allegro": ModelGeometry()}
# The defaults of diffusers' class, which the published weights have.
TRANSFORMERS = {"allegro": TransformerFlops(32, 2304, 9216)}


FLOPS = {_MODEL: partial(TransformerFlops.of_plain, cross_attention=True)}
BLOCKS = {_MODEL: ("transformer_blocks.*",)}


_MASK = Refused("attention_mask masks tokens of the video for each head. Call it without, with clips of one size.")


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            "": {"image_rotary_emb": {1: Split(1, keeps_whole=True)}, "attention_mask": _MASK},
            "transformer_blocks.0": {"hidden_states": Split(1)},
        },
        outputs={},
        gathers={"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn1": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {
    _MODEL: lambda _: {
        "transformer_blocks.*.attn1": {"video": Projection(rotary="image_rotary_emb", layout="axes", halves=True)}
    }
}
