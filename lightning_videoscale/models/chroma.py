"""Chroma as diffusers has it (`ChromaTransformer2DModel`): its sizes and split plan.

It is Flux with a network that makes all modulation, and a mask of text and image. A masked token is padding: it is no
key and, as a query, attends to nothing.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.flux.split import (
    CONTROL,
    DOUBLE,
    JOINT,
    OF_DOUBLE,
    SINGLE,
    TOKENS,
    flops,
    joint_attention,
)
from lightning_videoscale.models.sliced import sliceable
from lightning_videoscale.parallel import Projection, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_chroma.ChromaTransformer2DModel"

GEOMETRIES = {"chroma": ModelGeometry(temporal_stride=1, text_tokens=512)}  # images alone; text as the pipelines pad it
TRANSFORMERS = {"chroma": TransformerFlops(19 + 38, 3072, 12288, cross_attention=False)}  # the class's defaults
FLOPS = {_MODEL: flops}  # of the blocks: what makes the modulation is left out, as it works once a sample

BLOCKS = {_MODEL: (f"{DOUBLE}.*", f"{SINGLE}.*")}


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {**TOKENS, **CONTROL, "attention_mask": Split(1, JOINT)}},
        outputs={},
        gathers={"proj_out": {0: Split(1)}},
        attention=joint_attention(model, padded_rows=True),
    )


SPLIT_PLANS = {_MODEL: sliceable(_split_plan)}

_JOINED = Projection(tokens_of=JOINT, rotary="image_rotary_emb", rotary_of=JOINT)
_PROJECTIONS = {f"{DOUBLE}.*.attn": OF_DOUBLE, f"{SINGLE}.*.attn": dict.fromkeys(JOINT, _JOINED)}

PROJECTIONS = {_MODEL: lambda _: _PROJECTIONS}
