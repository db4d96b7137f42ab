"""LTX-Video and LTX-2 as diffusers has them (`LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`).

- `split`: the split plans, and sizes.
- `video`: the fused forwards of LTX-Video.
- `audio_video`, `audio_video_attention`: those of LTX-2.
"""

MODULES = ("split", "video", "audio_video", "audio_video_attention")
