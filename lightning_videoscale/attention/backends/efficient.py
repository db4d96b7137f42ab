"""Memory-efficient attention, by torch: the one fused kernel on GPUs for float32, and before Hopper for masks."""

from __future__ import annotations

import torch

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import HALF, AttentionKernel, needs_capability
from lightning_videoscale.compat.torch import attention


def _unusable(device: torch.device) -> str | None:
    return needs_capability(device, (8, 0))


def _limit(case: AttentionCase) -> str | None:
    if case.dtype not in (*HALF, torch.float32):
        return f"it computes bfloat16, float16 and float32, and this is {str(case.dtype).removeprefix('torch.')}"
    return f"it needs a head dim that is a multiple of 8, and this is {case.head_dim}" if case.head_dim % 8 else None


KERNEL = AttentionKernel("efficient", "torch", attention.efficient, attention.efficient_backward, _unusable, _limit)
