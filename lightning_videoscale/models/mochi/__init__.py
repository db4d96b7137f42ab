"""Mochi as diffusers has it (`MochiTransformer3DModel`).

- `split`: the split plan, and sizes.
- `attention`, `block`: the fused forwards.
"""

from lightning_videoscale.models.mochi.attention import FUSED_ATTENTION
from lightning_videoscale.models.mochi.block import FUSED_BLOCK
from lightning_videoscale.models.mochi.split import BLOCKS, FLOPS, GEOMETRIES, PROJECTIONS, SPLIT_PLANS, TRANSFORMERS

FUSED_BLOCKS = {block.class_path: block for block in (FUSED_BLOCK, FUSED_ATTENTION)}

__all__ = ["BLOCKS", "FLOPS", "FUSED_BLOCKS", "GEOMETRIES", "PROJECTIONS", "SPLIT_PLANS", "TRANSFORMERS"]
