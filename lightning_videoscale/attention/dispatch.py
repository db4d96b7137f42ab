"""Attention by the kernel that was chosen for the call.

`attention`            differentiable, without a log-sum-exp
`attention_part`       output and log-sum-exp over some of the keys, for a ring
`attention_part_backward`   its gradients
`as_autocast`          what autocast makes of tensors before attention
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.attention.attend import torch_attention
from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.choices import AttentionChoices
from lightning_videoscale.attention.op import attention_backward_op, attention_op
from lightning_videoscale.attention.records import SDPA
from lightning_videoscale.compat.torch.attention import Gradients
from lightning_videoscale.compat.torch.autograd import function_transforms_active, in_forward_mode


def attention(
    choices: AttentionChoices, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attention, differentiable once; where the kernel is torch's own pick, as often as that is.

    Transforms of `torch.func` and forward-mode derivatives go through torch's own kernels.

    Args:
        choices: What chooses.
        query: (B, H, S, D).
        key: (B, H, K, D).
        value: As ``key``.
        scale: Factor on the logits.
        mask: (B, K) bool, True where a key may be attended.

    Returns:
        (B, H, S, D); zeros for a sample of which no key may be attended.

    Raises:
        NotImplementedError: If the kernel asked for by name cannot run this.
    """
    if choices.leaves_it_to_torch(query.device):
        return torch_attention(query, key, value, scale, mask)
    if not torch.compiler.is_compiling():
        case = AttentionCase.of(query, key, masked=mask is not None, with_lse=False)
        if choices.choose(case) == SDPA or function_transforms_active() or in_forward_mode():
            return torch_attention(query, key, value, scale, mask)
    out: Tensor = attention_op(query, key, value, mask, scale, False, choices.number)[0]
    return out


def attention_part(
    choices: AttentionChoices, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `attend.attend`, by the kernel that was chosen."""
    out, lse = attention_op(query, key, value, mask, scale, True, choices.number)
    return out, lse


def attention_part_backward(
    choices: AttentionChoices,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None,
) -> Gradients:
    """As `attend.attend_backward`, by the kernel that was chosen."""
    dq, dk, dv = attention_backward_op(grad_out, query, key, value, out, lse, mask, scale, True, choices.number)
    return dq, dk, dv


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast will do for the attention kernel anyway, so that no wider number is sent."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype is torch.float32 else x for x in tensors)
