"""Fused operations, one per file, each a `torch.library` op with a PyTorch reference and faster backends.

- `norm_modulate`: LayerNorm or RMSNorm, then * (1 + scale) + shift, the adaptive norm of diffusion transformers.
- `fork_norm_modulate`: the same where x goes on as residual stream, its two gradients added inside.
- `gate_residual`: residual + gate * branch.
- `gate_residual_norm_modulate`: both in turn, the seam between two branches of a block. In backward both also sum the
  bias gradient of the Linear that the branch comes from, as `qk_norm_rope` does those of its projections.
- `gelu`: the GELU after a Linear, whose bias gradient its backward also sums; `gelu_linear`: with the Linear after it,
  both of which then keep one activation for backward instead of two.
- `qkv_linear`: the projections of q, k and v, the gradients of their input added inside the matrix products.
- `qk_norm_rope`: norm and rotation of q and k.

The first four share their vocabulary (`row_types`), the choice of a backend (`backend`) and how modulations reach it
(`modulation`, `row_ops`); `reference/`, `triton/` and `cuda/` are the backends.
"""

from lightning_videoscale.kernels.fork_norm_modulate import fork_norm_modulate
from lightning_videoscale.kernels.gate_residual import gate_residual
from lightning_videoscale.kernels.gate_residual_norm_modulate import gate_residual_norm_modulate
from lightning_videoscale.kernels.gelu import gelu
from lightning_videoscale.kernels.gelu_linear import gelu_linear
from lightning_videoscale.kernels.norm_modulate import norm_modulate
from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope, rope_per_pair
from lightning_videoscale.kernels.qkv_linear import qkv_linear

__all__ = [
    "fork_norm_modulate",
    "gate_residual",
    "gate_residual_norm_modulate",
    "gelu",
    "gelu_linear",
    "norm_modulate",
    "qk_norm_rope",
    "qkv_linear",
    "rope_per_pair",
]
