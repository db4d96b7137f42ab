"""Flux.1 as diffusers has it, and what its kin has in common with it.

- `split`: the split plan, and sizes.
- `fused`: the fused forwards.
"""

MODULES = ("split", "fused")
