"""Wan 2.1, 2.2 and TI2V as diffusers has them (`WanTransformer3DModel`).

- `sizes`: of the published models, and the work of any.
- `attention`: what its attention computes around any exchange.
- `split`: the split plan, and the attention that exchanges.
- `fused_attention`, `block`, `timesteps`: the fused forwards. The embedding is of timesteps that repeat over tokens.

- `vace`, `animate`, `skyreels_v2`, `chronoedit`: models that are made of Wan's blocks, or of copies of them.
"""

from lightning_videoscale.models.wan.block import FUSED_BLOCK
from lightning_videoscale.models.wan.fused_attention import FUSED_ATTENTION, MODULE
from lightning_videoscale.models.wan.sizes import GEOMETRIES, TRANSFORMERS, flops
from lightning_videoscale.models.wan.split import SequenceParallelWanAttention, projections, split_plan
from lightning_videoscale.models.wan.timesteps import FUSED_TIMESTEPS

__all__ = [
    "FLOPS",
    "FUSED_BLOCKS",
    "GEOMETRIES",
    "PROJECTIONS",
    "SPLIT_PLANS",
    "TRANSFORMERS",
    "SequenceParallelWanAttention",
]

_MODEL = f"{MODULE}.WanTransformer3DModel"

SPLIT_PLANS = {_MODEL: split_plan}
PROJECTIONS = {_MODEL: projections}
FLOPS = {_MODEL: flops}
FUSED_BLOCKS = {block.class_path: block for block in (FUSED_BLOCK, FUSED_ATTENTION, FUSED_TIMESTEPS)}
