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
    kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """As `attend.attend`, differentiable once, without the log-sum-exp."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out: Tensor = _Attention.apply(kernel, query, key, value, scale, mask)  # type: ignore[no-untyped-call]
        return out
    return attend(kernel, query, key, value, scale, mask)[0]


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
    ) -> Tensor:
        out, lse = attend(kernel, query, key, value, scale, mask)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, mask = ctx.saved_tensors
        # Where a graph of backward is made, it gets a node that refuses the second derivative.
        run = _Backward.apply if torch.is_grad_enabled() else attend_backward
        dq, dk, dv = run(ctx.kernel, grad, query, key, value, out, lse, ctx.scale, mask)
        return None, dq, dk, dv, None, None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Gradients:
        return attend_backward(*inputs)

    backward = staticmethod(refuse_second_derivative)
