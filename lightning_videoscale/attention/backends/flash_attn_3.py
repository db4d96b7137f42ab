"""FlashAttention 3, which its authors offer as source only: Hopper."""

from __future__ import annotations

import torch

from lightning_videoscale.attention.kernel import AttentionKernel, needs_capability, needs_half
from lightning_videoscale.compat import flash_attn


def _unusable(device: torch.device) -> str | None:
    return needs_capability(device, (9, 0), most=9) or flash_attn.missing(3)


KERNEL = AttentionKernel(
    "flash_attn_3", "flash-attn-3", flash_attn.flash_attn_3, flash_attn.flash_attn_3_backward, _unusable, needs_half
)
