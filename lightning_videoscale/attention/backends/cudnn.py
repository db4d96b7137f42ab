"""cuDNN's attention, by torch."""

from __future__ import annotations

import torch

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel, needs_capability, needs_half
from lightning_videoscale.compat.torch import attention


def _unusable(device: torch.device) -> str | None:
    if reason := needs_capability(device, (9, 0)):  # as SDPA's own order has it before flash from there on
        return reason
    return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"


def _limit(case: AttentionCase) -> str | None:
    if reason := needs_half(case, 256):
        return reason
    if case.deterministic:
        return "its backward is not deterministic"
    # Of as many tokens as it wants at least: how many there are decides nothing else.
    sample = torch.empty(1, 1, 64, case.head_dim, dtype=case.dtype, device=case.device)
    params = torch.backends.cuda.SDPAParams(sample, sample, sample, None, 0.0, False, False)
    fits = torch.backends.cuda.can_use_cudnn_attention(params)
    return None if fits else f"cuDNN {torch.backends.cudnn.version()} does not take head dim {case.head_dim}"


KERNEL = AttentionKernel("cudnn", "torch", attention.cudnn, attention.cudnn_backward, _unusable, _limit)
