"""AnyFlow as diffusers has it (`AnyFlowTransformer3DModel`), which attends to all frames.

Copies of Wan's blocks. Each frame has a timestep and one to go to. The model repeats what it makes of them over a
frame's tokens, (B, S, 6, D) for the blocks and (B, S, D) for the output, which it modulates outside of any module:
hence the gather behind the last block.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.models.wan.sizes import flops
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_anyflow.AnyFlowTransformer3DModel"

GEOMETRIES = {"anyflow": ModelGeometry()}
TRANSFORMERS = {"anyflow-14b": TransformerFlops(40, 5120, 13824)}  # the defaults of diffusers' class
FLOPS = {_MODEL: flops}
BLOCKS = {_MODEL: ("blocks.*",)}


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"blocks.0": {"hidden_states": Split(1)}, "blocks.*": {"temb": Split(1, ndim=4)}},
        outputs={"rope": {0: Split(2)}},
        gathers={"blocks.-1": {0: Split(1)}},
        attention={"blocks.*.attn1": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {
    _MODEL: lambda _: {"blocks.*.attn1": {"video": Projection(across_heads=True, rotary="rotary_emb", layout="dict")}}
}
