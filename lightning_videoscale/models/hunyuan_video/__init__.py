"""HunyuanVideo, its Framepack and HunyuanVideo-1.5, as diffusers has them.

- `split`: the split plans, and sizes.
- `attention`, `blocks`: the fused forwards.
"""

MODULES = ("split", "blocks", "attention")
