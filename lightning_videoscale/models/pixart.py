"""PixArt-α and PixArt-Σ as diffusers has them (`PixArtTransformer2DModel`).

Text enters by cross-attention and stays whole; positions are added to the tokens before any block. Masks of the image's
tokens are refused, as diffusers repeats them for each head.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Refused, Split, SplitPlan

_MODEL = "diffusers.models.transformers.pixart_transformer_2d.PixArtTransformer2DModel"

GEOMETRIES = {"pixart": ModelGeometry(temporal_stride=1)}
# The defaults of diffusers' class, which the published weights have.
TRANSFORMERS = {"pixart": TransformerFlops(28, 1152, 4608)}


FLOPS = {_MODEL: partial(TransformerFlops.of_plain, cross_attention=True)}
BLOCKS = {_MODEL: ("transformer_blocks.*",)}


_MASK = Refused(
    "attention_mask masks tokens of the image for each head. Call it without, with images of one size. The text's "
    "mask is encoder_attention_mask."
)


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {"attention_mask": _MASK}, "transformer_blocks.0": {"hidden_states": Split(1)}},
        outputs={},
        gathers={"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn1": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {_MODEL: lambda _: {"transformer_blocks.*.attn1": {"video": Projection()}}}
