"""Mochi as diffusers has it (`MochiTransformer3DModel`).

- `split`: the split plan, and sizes.
- `attention`, `block`: the fused forwards.
"""

MODULES = ("split", "block", "attention")
