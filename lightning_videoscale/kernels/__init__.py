"""Fused operations, one per file: for each a PyTorch reference (float64-capable) behind one `torch.library` op.

- `norm_modulate`: LayerNorm, then * (1 + scale) + shift, the adaptive norm of diffusion transformers.
"""

from lightning_videoscale.kernels.norm_modulate import norm_modulate

__all__ = ["norm_modulate"]
