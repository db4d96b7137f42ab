"""Attention by one kernel as one node of autograd, called without the dispatcher: `attend_differentiably`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention.attend import attend, attend_backward
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.attention.op import refuse_second_derivative
from lightning_videoscale.compat.torch.attention import Gradients


def attend_differentiably(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    *,
    is_open: bool = False,
) -> Tensor:
    """As `attend.attend`, differentiable once, without the log-sum-exp."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out: Tensor = _Attention.apply(kernel, query, key, value, scale, mask, is_open)  # type: ignore[no-untyped-call]
        return out
    return attend(kernel, query, key, value, scale, mask, is_open=is_open)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: AttentionKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        mask: Tensor | None,
        is_open: bool,
    ) -> Tensor:
        out, lse = attend(kernel, query, key, value, scale, mask, is_open=is_open)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.kernel, ctx.scale, ctx.is_open = kernel, scale, is_open
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, mask = ctx.saved_tensors
        # Where a graph of backward is made, it gets a node that refuses the second derivative.
        run = _Backward.apply if torch.is_grad_enabled() else _backward
        dq, dk, dv = run(ctx.is_open, ctx.kernel, grad, query, key, value, out, lse, ctx.scale, mask)
        return None, dq, dk, dv, None, None, None


def _backward(is_open: bool, *inputs: Any) -> Gradients:
    return attend_backward(*inputs, is_open=is_open)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Gradients:
        return _backward(*inputs)

    backward = staticmethod(refuse_second_derivative)
