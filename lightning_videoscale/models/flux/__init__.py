"""Flux.1 as diffusers has it, and what its kin has in common with it.

- `split`: the split plan, and sizes.
- `fused`: the fused forwards.
"""

from lightning_videoscale.models.flux.fused import FUSED_ATTENTIONS, FUSED_BLOCKS
from lightning_videoscale.models.flux.split import (
    BLOCKS,
    FLOPS,
    GEOMETRIES,
    PROJECTIONS,
    SPLIT_PLANS,
    TRANSFORMERS,
)

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
