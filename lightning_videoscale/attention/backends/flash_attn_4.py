"""FlashAttention 4, by the package flash-attn-4 (CuTe DSL), which is beta: Hopper and Blackwell."""

from __future__ import annotations

import torch

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel, needs_capability, needs_half
from lightning_videoscale.compat import flash_attn


def _unusable(device: torch.device) -> str | None:
    return needs_capability(device, (9, 0), most=11) or flash_attn.missing(4)


def _limit(case: AttentionCase) -> str | None:
    reason = needs_half(case)
    if reason is None and torch.cuda.get_device_capability(case.device)[0] > 9 and 128 < case.head_dim < 256:
        return f"on Blackwell it needs a head dim up to 128, or 256, and this is {case.head_dim}"
    return reason


KERNEL = AttentionKernel(
    "flash_attn_4", "flash-attn-4", flash_attn.flash_attn_4, flash_attn.flash_attn_4_backward, _unusable, _limit
)
