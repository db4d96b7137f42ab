"""HunyuanVideo, its Framepack and HunyuanVideo-1.5, as diffusers has them.

- `split`: the split plans, and sizes.
- `attention`, `blocks`: the fused forwards.
"""

from lightning_videoscale.models.hunyuan_video.attention import FUSED_ATTENTIONS
from lightning_videoscale.models.hunyuan_video.blocks import FUSED_BLOCKS
from lightning_videoscale.models.hunyuan_video.split import (
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
