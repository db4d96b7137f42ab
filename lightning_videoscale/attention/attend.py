"""Attention by one kernel that also returns its log-sum-exp, forward and backward apart: what a ring is made of.

A part of a softmax over keys can be merged with its other parts if its log-sum-exp is known, and the gradient of a part
needs nothing of the others but the *whole* output and the *whole* log-sum-exp.

`attend`            output and log-sum-exp
`attend_backward`   gradients of one part of the keys, given the output and log-sum-exp over all keys
`torch_attention`   torch's function, which picks a kernel by itself and hides the log-sum-exp
`kernel_of_torch`   the kernel that stands for torch's own pick where the log-sum-exp is needed
`with_whole_rows`   a tensor as kernels can read it

Shapes: B batch, S queries, K keys, H heads, D head dim; tensors are (B, H, S, D), log-sum-exps (B, H, S).
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.attention.masks import additive, open_mask
from lightning_videoscale.compat.torch.attention import Gradients, sdpa_choice, to_whole_tiles


def attend(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    is_open: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over these keys, and the log-sum-exp of its logits.

    Args:
        kernel: What computes it.
        query: (B, H, S, D).
        key: (B, H, K, D), of any length K >= 1.
        value: As ``key``.
        scale: Factor on the logits.
        mask: (B, K) bool, True where a key may be attended; all may if left out.
        is_open: Every sample of the mask is known to have such a key.

    Returns:
        (B, H, S, D) in query's dtype, and (B, H, S) in float32 (float64 for float64). A sample without a key to attend
        has zeros and minus infinity.
    """
    mask, empty = (mask, None) if mask is None or is_open else open_mask(mask)
    query, key, value = (with_whole_rows(x) for x in (query, key, value))
    out, lse = kernel.forward(query, key, value, scale, additive(mask, query.dtype))
    if empty is not None:
        out = out.masked_fill(empty.view(-1, 1, 1, 1), 0.0)
        lse = lse.masked_fill(empty.view(-1, 1, 1), -torch.inf)
    return out, lse


def attend_backward(
    kernel: AttentionKernel,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    is_open: bool = False,
) -> Gradients:
    """What these keys contribute to the gradient of attention over them and others.

    Args:
        kernel: What computes it, the one of the forward pass or another.
        grad_out: (B, H, S, D), gradient of ``out``.
        query: As in `attend`.
        key: As in `attend`.
        value: As in `attend`.
        out: (B, H, S, D), attention over *all* keys.
        lse: (B, H, S), log-sum-exp over *all* keys.
        scale: As in `attend`.
        mask: As in `attend`.
        is_open: As in `attend`.

    Returns:
        Gradients of ``query`` (this part of it), ``key`` and ``value``, in their dtypes.
    """
    mask, empty = (mask, None) if mask is None or is_open else open_mask(mask)
    grad_out, query, key, value, out = (with_whole_rows(x) for x in (grad_out, query, key, value, out))
    gradients = kernel.backward(grad_out, query, key, value, out, lse, scale, additive(mask, query.dtype))
    if empty is None:
        return gradients
    # Not a product with zero: where all samples' keys are hidden from a row, its probabilities here are infinite.
    dq, dk, dv = (x.masked_fill(empty.view(-1, 1, 1, 1), 0.0) for x in gradients)
    return dq, dk, dv


def with_whole_rows(x: Tensor) -> Tensor:
    """Returns x with the channels of a token side by side in memory, as convolutions do not leave them.

    Torch's own function copies such tensors; a kernel refuses them, or on CPUs reads others than those it is given.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, *, is_open: bool = False
) -> Tensor:
    """As `attend`, by torch's own function and whatever kernel it picks; differentiable, without a log-sum-exp."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    mask, empty = (mask, None) if is_open else open_mask(mask)
    pairs: Tensor | None = mask[:, None, None]
    if query.is_cuda:  # torch may pick cuDNN
        key, value, pairs = to_whole_tiles(key, value, pairs)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=pairs, scale=scale)
    return out if empty is None else out.masked_fill(empty.view(-1, 1, 1, 1), 0.0)


def kernel_of_torch(case: AttentionCase) -> AttentionKernel:
    """Returns the kernel that torch would pick, or the nearest to it that returns the log-sum-exp.

    | device | dtype | kernel |
    |---|---|---|
    | CPU | all | flash |
    | CUDA | bfloat16, float16 | cuDNN where torch would take it on Hopper or newer; else flash, with a mask efficient |
    | CUDA | float32 | efficient |
    | CUDA | float64, and head dims that are no multiple of 8 | matrix products |

    Kernels that `torch.nn.attention.sdpa_kernel` has switched off are left out, if that leaves any.

    Raises:
        RuntimeError: If no kernel is known for the device.
    """
    if case.device.type not in ("cpu", "cuda"):
        raise RuntimeError(
            f"No attention kernel that returns its log-sum-exp is known for {case.device}; known: cpu, cuda."
        )
    if case.device.type == "cpu":
        return KERNELS["flash"]
    if case.head_dim % 8 and case.dtype not in (torch.float32, torch.float64):
        warnings.warn(
            f"Attention in {case.dtype} with head dim {case.head_dim} runs slowly where its log-sum-exp is needed, by "
            "matrix products: the fused kernels need a multiple of 8.",
            stacklevel=2,
        )
    allowed = sdpa_choice()
    for name in ("cudnn", "flash", "efficient"):
        if (allowed is None or name in allowed) and KERNELS[name].objection(case) is None:
            return KERNELS[name]
    return KERNELS["math"]
