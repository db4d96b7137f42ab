"""Attention on one device that also returns its log-sum-exp, forward and backward apart: what a ring is made of.

A part of a softmax over keys can be merged with its other parts if its log-sum-exp is known, and the gradient of a part
needs nothing of the others but the *whole* output and the *whole* log-sum-exp. PyTorch's public attention hides both,
so the kernels are its private ones (`compat.torch.attention`).

`attend`            output and log-sum-exp
`attend_backward`   gradients of one part of the keys, given the output and log-sum-exp over all keys
`open_mask`         a key mask that every kernel can take: no sample without a key

Shapes: B batch, S queries, K keys, H heads, D head dim; tensors are (B, H, S, D), in memory with heads or tokens first,
log-sum-exps (B, H, S).

| device | dtype | kernel |
|---|---|---|
| CPU | all | flash |
| CUDA | bfloat16, float16 | cuDNN where torch would take it on Hopper or newer, else flash; efficient with a mask |
| CUDA | float32 | efficient |
| CUDA | float64, and head dims that are no multiple of 8 | matrix products, a slice of the queries at a time |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.compat.torch import attention
from lightning_videoscale.compat.torch.attention import Gradients

_Forward = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
_Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None], Gradients]

_LOGITS_BYTES = 1 << 28  # of one slice of queries, by matrix products


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over these keys, and the log-sum-exp of its logits.

    Args:
        query: (B, H, S, D).
        key: (B, H, K, D), of any length K >= 1.
        value: As ``key``.
        scale: Factor on the logits.
        mask: (B, K) bool, True where a key may be attended; all may if left out.

    Returns:
        (B, H, S, D) in query's dtype, and (B, H, S) in float32 (float64 for float64). A sample without a key to attend
        has zeros and minus infinity.

    Raises:
        RuntimeError: If this torch lacks the kernel, or none is known for the device.
    """
    mask, empty = open_mask(mask) if mask is not None else (None, None)
    out, lse = _kernel(query, key, mask).forward(query, key, value, scale, _bias(mask, query.dtype))
    if empty is not None:
        out = out.masked_fill(empty.view(-1, 1, 1, 1), 0.0)
        lse = lse.masked_fill(empty.view(-1, 1, 1), -torch.inf)
    return out, lse


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Gradients:
    """What these keys contribute to the gradient of attention over them and others.

    Args:
        grad_out: (B, H, S, D), gradient of ``out``.
        query: As in `attend`.
        key: As in `attend`.
        value: As in `attend`.
        out: (B, H, S, D), attention over *all* keys.
        lse: (B, H, S), log-sum-exp over *all* keys.
        scale: As in `attend`.
        mask: As in `attend`.

    Returns:
        Gradients of ``query`` (this part of it), ``key`` and ``value``, in their dtypes.
    """
    mask, empty = open_mask(mask) if mask is not None else (None, None)
    backward, bias = _kernel(query, key, mask).backward, _bias(mask, query.dtype)
    gradients = backward(grad_out, query, key, value, out, lse, scale, bias)
    if empty is None:
        return gradients
    # Not a product with zero: where all samples' keys are hidden from a row, its probabilities here are infinite.
    dq, dk, dv = (x.masked_fill(empty.view(-1, 1, 1, 1), 0.0) for x in gradients)
    return dq, dk, dv


def open_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Opens the samples of which no key may be attended, which kernels answer with NaN.

    Args:
        mask: (B, K) bool.

    Returns:
        The mask with those samples wholly True, and (B,) bool that is True for them: their results are to be zeroed.
    """
    empty = ~mask.any(1)
    return mask | empty[:, None], empty


class _Kernel(NamedTuple):
    """A pair of functions on (B, H, S, D) tensors, a scale and an additive (B, 1, 1, K) bias."""

    forward: _Forward
    backward: _Backward


def _kernel(query: Tensor, key: Tensor, mask: Tensor | None) -> _Kernel:
    device, dtype = query.device, query.dtype
    if device.type == "cpu":
        return _FLASH_CPU
    if device.type != "cuda":
        raise RuntimeError(f"No attention kernel that returns its log-sum-exp is known for {device}; known: cpu, cuda.")
    if dtype is torch.float64:
        return _PRODUCTS
    if query.shape[3] % 8:
        if dtype is not torch.float32:
            warnings.warn(
                f"Ring attention in {dtype} with head dim {query.shape[3]} runs slowly, by matrix products: the fused "
                "kernels need a multiple of 8.",
                stacklevel=2,
            )
        return _PRODUCTS
    if mask is not None or dtype is torch.float32:
        return _EFFICIENT
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    params = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, False, False)
    return _CUDNN if hopper and torch.backends.cuda.can_use_cudnn_attention(params) else _FLASH


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    # A row that starts on 16 elements, as the efficient kernel wants to read it.
    keys = mask.shape[1]
    row = torch.zeros(mask.shape[0], -(-keys // 16) * 16, dtype=dtype, device=mask.device)[:, :keys]
    return row.masked_fill_(~mask, -torch.inf)[:, None, None]


# -- matrix products -----------------------------------------------------------------------------------------------


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for rows in _slices(q, k):
        logits = _logits(q[:, :, rows], k, scale, bias)
        lses.append(logits.logsumexp(-1))
        outs.append((logits - lses[-1][..., None]).exp() @ v.to(logits.dtype))
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)


def _products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    wide = lse.dtype
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows in _slices(q, k):
        grad_rows = grad[:, :, rows].to(wide)
        probabilities = (_logits(q[:, :, rows], k, scale, bias) - lse[:, :, rows, None]).exp()
        dv += probabilities.mT @ grad_rows
        delta = (grad_rows * out[:, :, rows]).sum(-1, keepdim=True)
        dlogits = probabilities * (grad_rows @ v.to(wide).mT - delta) * scale
        dq[:, :, rows] = dlogits @ k.to(wide)
        dk += dlogits.mT @ q[:, :, rows].to(wide)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, heads, queries, _ = q.shape
    step = max(1, _LOGITS_BYTES // (batch * heads * k.shape[2] * 8))
    return (slice(start, start + step) for start in range(0, queries, step))


def _logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).mT * scale
    return logits + bias.to(wide) if bias is not None else logits


_FLASH_CPU = _Kernel(attention.flash_cpu, attention.flash_cpu_backward)
_FLASH = _Kernel(attention.flash, attention.flash_backward)
_CUDNN = _Kernel(attention.cudnn, attention.cudnn_backward)
_EFFICIENT = _Kernel(attention.efficient, attention.efficient_backward)
_PRODUCTS = _Kernel(_products, _products_backward)
