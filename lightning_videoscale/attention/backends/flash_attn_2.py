"""FlashAttention 2, by the package flash-attn."""

from __future__ import annotations

import torch

from lightning_videoscale.attention.kernel import AttentionKernel, needs_capability, needs_half
from lightning_videoscale.compat import flash_attn


def _unusable(device: torch.device) -> str | None:
    return needs_capability(device, (8, 0)) or flash_attn.missing(2)


KERNEL = AttentionKernel(
    "flash_attn_2", "flash-attn", flash_attn.flash_attn_2, flash_attn.flash_attn_2_backward, _unusable, needs_half
)
