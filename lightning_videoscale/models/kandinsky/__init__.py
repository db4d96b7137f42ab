"""Kandinsky 5 as diffusers has it (`Kandinsky5Transformer3DModel`).

- `split`: the split plan, and sizes.
- `attention`, `blocks`: the fused forwards.
"""

from lightning_videoscale.models.kandinsky import blocks
from lightning_videoscale.models.kandinsky.attention import FUSED_ATTENTION
from lightning_videoscale.models.kandinsky.split import (
    BLOCKS,
    FLOPS,
    GEOMETRIES,
    PROJECTIONS,
    SPLIT_PLANS,
    TRANSFORMERS,
)

FUSED_BLOCKS = {block.class_path: block for block in (*blocks.FUSED_BLOCKS, FUSED_ATTENTION)}

__all__ = ["BLOCKS", "FLOPS", "FUSED_BLOCKS", "GEOMETRIES", "PROJECTIONS", "SPLIT_PLANS", "TRANSFORMERS"]
