"""Cosmos 1, 2 and 2.5 as diffusers has them (`CosmosTransformer3DModel`).

- `split`: the split plan, and sizes.
- `attention`, `block`: the fused forwards.
"""

MODULES = ("split", "block", "attention")
