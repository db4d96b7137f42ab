"""FlashAttention 2 as torch has it; on CPUs torch's own flash kernel, which takes masks and every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel, needs_capability, needs_half
from lightning_videoscale.compat.torch import attention
from lightning_videoscale.compat.torch.attention import Gradients


def _unusable(device: torch.device) -> str | None:
    return None if device.type == "cpu" else needs_capability(device, (8, 0))


def _limit(case: AttentionCase) -> str | None:
    return None if case.device.type == "cpu" else needs_half(case)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    run = attention.flash_cpu if q.device.type == "cpu" else attention.flash
    return run(q, k, v, scale, bias)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    run = attention.flash_cpu_backward if q.device.type == "cpu" else attention.flash_backward
    return run(grad, q, k, v, out, lse, scale, bias)


KERNEL = AttentionKernel("flash", "torch", _forward, _backward, _unusable, _limit)
