"""Attention by the kernel that was chosen for the call.

`attention`            differentiable, without a log-sum-exp
`attention_part`       output and log-sum-exp over some of the keys, for a ring
`attention_part_backward`   its gradients
`refuse_modes`         where the function of torch that a mode may change is not called
`as_autocast`          what autocast makes of tensors before attention

The host may take longer to launch short attention than a GPU to compute it. So plain tensors go to torch's function or
to the kernel straight away; the ops of `op`, which cost several times the host's time, are for compilers and for
whatever else watches ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.attention.attend import attend, attend_backward, torch_attention
from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.choices import AttentionChoices
from lightning_videoscale.attention.differentiable import attend_differentiably
from lightning_videoscale.attention.op import attention_backward_op, attention_op
from lightning_videoscale.attention.records import SDPA
from lightning_videoscale.compat.torch.attention import Gradients, with_gradient_in_order
from lightning_videoscale.compat.torch.autograd import (
    dispatch_modes_active,
    function_modes,
    function_transforms_active,
    in_forward_mode,
)


def attention(
    choices: AttentionChoices,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    is_open: bool = False,
) -> Tensor:
    """Attention, differentiable once; where the kernel is torch's own pick, as often as that is.

    Transforms of `torch.func`, forward-mode derivatives and modes that may change attention get torch's own function.

    Args:
        choices: What chooses.
        query: (B, H, S, D).
        key: (B, H, K, D).
        value: As ``key``.
        scale: Factor on the logits.
        mask: (B, K) bool, True where a key may be attended.
        is_open: Every sample of the mask is known to have such a key, which spares a look and filling in zeros.

    Returns:
        (B, H, S, D); zeros for a sample of which no key may be attended.

    Raises:
        NotImplementedError: If the kernel asked for by name cannot run this.
    """
    out: Tensor
    if torch.compiler.is_compiling():
        if choices.leaves_it_to_torch(query.device) or _mode() is not None:
            return torch_attention(query, key, value, scale, mask, is_open=is_open)
        out = attention_op(query, key, value, mask, scale, False, choices.number)[0]
        return out
    name = choices.name_for(query, key, mask is not None, False)
    if function_transforms_active() or in_forward_mode() or _mode() is not None:
        return torch_attention(query, key, value, scale, mask, is_open=is_open)
    if name == SDPA:
        return with_gradient_in_order(torch_attention(query, key, value, scale, mask, is_open=is_open))
    if _is_plain(query):
        return attend_differentiably(KERNELS[name], query, key, value, scale, mask, is_open=is_open)
    out = attention_op(query, key, value, mask, scale, False, choices.number)[0]
    return out


def attention_part(
    choices: AttentionChoices,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    is_open: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `attend.attend`, by the kernel that was chosen; for the inside of an autograd function."""
    if not torch.compiler.is_compiling() and _is_plain(query):
        kernel = choices.kernel_for(query, key, mask is not None, True)
        return attend(kernel, query, key, value, scale, mask, is_open=is_open)
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
    *,
    is_open: bool = False,
) -> Gradients:
    """As `attend.attend_backward`, by the kernel that was chosen; for the inside of an autograd function."""
    if not torch.compiler.is_compiling() and _is_plain(query):
        kernel = choices.kernel_for(query, key, mask is not None, True)
        return attend_backward(kernel, grad_out, query, key, value, out, lse, scale, mask, is_open=is_open)
    dq, dk, dv = attention_backward_op(grad_out, query, key, value, out, lse, mask, scale, True, choices.number)
    return dq, dk, dv


def refuse_modes(what: str) -> None:
    """Refuses modes of torch around ``what``, which attends without the function that they may change.

    Raises:
        ValueError: If there is one that does not say that it ``leaves_attention``.
    """
    if (mode := _mode()) is not None:
        raise ValueError(
            f"{what} does not call torch's scaled_dot_product_attention, which the mode {mode} around it may change. "
            "diffusers' LayerSkipConfig(skip_attention_scores=True) and perturbed attention guidance have such a mode. "
            "Take ring_size=1 and schedule='serial' or 'overlap', or call the network outside of the mode."
        )


def _mode() -> str | None:
    """The name of a mode that may do something else in the place of torch's attention."""
    for mode in function_modes():
        if not getattr(mode, "leaves_attention", False):
            return type(mode).__name__
    return None


def _is_plain(x: Tensor) -> bool:
    """Whether nothing watches what happens to a tensor: no class of its own, and no mode, as of fake tensors."""
    return type(x) is Tensor and not dispatch_modes_active()


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast will do for the attention kernel anyway, so that no wider number is sent."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype is torch.float32 else x for x in tensors)
