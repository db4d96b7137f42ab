"""Kandinsky 5 as diffusers has it (`Kandinsky5Transformer3DModel`).

- `split`: the split plan, and sizes.
- `attention`, `blocks`: the fused forwards.
"""

MODULES = ("split", "blocks", "attention")
