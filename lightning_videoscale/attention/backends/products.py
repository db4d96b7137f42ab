"""Attention by matrix products, a slice of the queries at a time: for every device, dtype and head dim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.compat.torch.attention import Gradients
from lightning_videoscale.kernels.autograd import under_autocast

_LOGITS_BYTES = 1 << 28  # of one slice of queries


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    with _without_autocast(q):
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
    with _without_autocast(q):
        for rows in _slices(q, k):
            grad_rows = grad[:, :, rows].to(wide)
            probabilities = (_logits(q[:, :, rows], k, scale, bias) - lse[:, :, rows, None]).exp()
            dv += probabilities.mT @ grad_rows
            delta = (grad_rows * out[:, :, rows]).sum(-1, keepdim=True)
            dlogits = probabilities * (grad_rows @ v.to(wide).mT - delta) * scale
            dq[:, :, rows] = dlogits @ k.to(wide)
            dk += dlogits.mT @ q[:, :, rows].to(wide)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, matrix products are computed in the dtype of their factors."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else nullcontext()


def _slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, heads, queries, _ = q.shape
    step = max(1, _LOGITS_BYTES // (batch * heads * k.shape[2] * 8))
    return (slice(start, start + step) for start in range(0, queries, step))


def _logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).mT * scale
    return logits + bias.to(wide) if bias is not None else logits


def _unusable(device: torch.device) -> str | None:
    return None if device.type in ("cpu", "cuda") else f"it was tried on CPUs and NVIDIA GPUs, and this is {device}"


def _limit(case: AttentionCase) -> str | None:
    return None


KERNEL = AttentionKernel("math", "torch", _products, _products_backward, _unusable, _limit)
