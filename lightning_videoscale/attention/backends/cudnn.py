"""cuDNN's attention, by torch; it takes masks."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel, needs_capability, needs_half
from lightning_videoscale.compat.torch import attention


def _unusable(device: torch.device) -> str | None:
    if reason := needs_capability(device, (9, 0)):  # as SDPA's own order has it before flash from there on
        return reason
    return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"


def _limit(case: AttentionCase) -> str | None:
    if reason := needs_half(replace(case, masked=False)):
        return reason
    if case.deterministic:
        return "its backward is not deterministic"
    # Of a single token or several: how many there are decides nothing else.
    query, key = (
        torch.empty(1, 1, min(tokens, 64), case.head_dim, dtype=case.dtype, device=case.device)
        for tokens in (case.queries, case.keys)
    )
    params = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, False, False)
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return None
    version = torch.backends.cudnn.version()
    return f"cuDNN {version} does not take {case.queries} queries and {case.keys} keys of head dim {case.head_dim}"


KERNEL = AttentionKernel("cudnn", "torch", attention.cudnn, attention.cudnn_backward, _unusable, _limit)
