"""Cosmos 1, 2 and 2.5 as diffusers has them (`CosmosTransformer3DModel`).

- `split`: the split plan, and sizes.
- `attention`, `block`: the fused forwards.
"""

from lightning_videoscale.models.cosmos.attention import FUSED_ATTENTIONS
from lightning_videoscale.models.cosmos.block import FUSED_BLOCKS
from lightning_videoscale.models.cosmos.split import BLOCKS, FLOPS, GEOMETRIES, PROJECTIONS, SPLIT_PLANS, TRANSFORMERS

__all__ = [
    "BLOCKS",
    "FLOPS",
    "FUSED_ATTENTIONS",
    "FUSED_BLOCKS",
    "GEOMETRIES",
    "PROJECTIONS",
    "SPLIT_PLANS",
    "TRANSFORMERS",
]
