"""LTX-Video and LTX-2 as diffusers has them (`LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`).

- `split`: the split plans, and sizes.
- `video`: the fused forwards of LTX-Video.
- `audio_video`, `audio_video_attention`: those of LTX-2.
"""

from lightning_videoscale.models.ltx import audio_video, video
from lightning_videoscale.models.ltx.audio_video_attention import FUSED_ATTENTIONS
from lightning_videoscale.models.ltx.split import BLOCKS, FLOPS, GEOMETRIES, PROJECTIONS, SPLIT_PLANS, TRANSFORMERS

FUSED_BLOCKS = video.FUSED_BLOCKS | audio_video.FUSED_BLOCKS

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
