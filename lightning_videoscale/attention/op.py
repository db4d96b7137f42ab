"""Attention as one op, whose kernel is looked up when it runs.

Compilers see an op and no kernel: compiled code serves every length and every choice, and is not compiled anew when
another kernel is chosen. An op takes plain values only, so that what chooses is handed to it as a number.

Results lie in memory with tokens before heads, whatever the kernel, as a compiler must know.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_videoscale.attention.attend import attend, attend_backward
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.compat.torch.attention import tokens_first
from lightning_videoscale.kernels.autograd import NAMESPACE, define_op, refuse_derivative, register_autograd

_FORWARD, _BACKWARD = f"{NAMESPACE}::attention", f"{NAMESPACE}::attention_backward"
_SECOND_DERIVATIVE = (
    "Attention by a chosen kernel has no second derivative, as a penalty on gradients of inputs needs it. Call the "
    "model inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has one and overrides attention_backend=."
)


class Chooser(Protocol):
    """What knows the kernel of a call."""

    def kernel_for(self, query: Tensor, key: Tensor, masked: bool, with_lse: bool) -> AttentionKernel:
        """Returns the kernel that runs a call."""


_choosers: list[Chooser] = []
"""By number. They stay: graphs for backward and compiled code may hold a number for as long as the process lives."""


def register(chooser: Chooser) -> int:
    """Returns the number under which the ops find it from now on."""
    _choosers.append(chooser)
    return len(_choosers) - 1


def chooser(number: int) -> Any:
    """Returns what has a number."""
    return _choosers[number]


def _kernel(query: Tensor, key: Tensor, mask: Tensor | None, with_lse: bool, chooser: int) -> AttentionKernel:
    return _choosers[chooser].kernel_for(query, key, mask is not None, with_lse)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, with_lse: bool, chooser: int
) -> tuple[Tensor, Tensor]:
    kernel = _kernel(query, key, mask, with_lse, chooser)
    out, lse = attend(kernel, query, key, value, scale, mask)
    return tokens_first(out), lse.contiguous()


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    with_lse: bool,
    chooser: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _kernel(query, key, mask, with_lse, chooser)
    dq, dk, dv = attend_backward(kernel, grad, query, key, value, out, lse, scale, mask)
    return tokens_first(dq), tokens_first(dk), tokens_first(dv)


def _like(x: Tensor) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)


def forward_fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes of output and log-sum-exp."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return _like(query), query.new_empty(query.shape[:3], dtype=wide)


def backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of the gradients of query, key and value."""
    return _like(query), _like(key), _like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.rest = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, out, lse, mask)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, mask = ctx.saved_tensors
    return *attention_backward_op(grad, query, key, value, out, lse, mask, *ctx.rest), None, None, None, None


def refuse_second_derivative(ctx: object, *gradients: Tensor) -> None:
    """Raises a `NotImplementedError`, in the place of the derivative of attention's backward."""
    raise NotImplementedError(_SECOND_DERIVATIVE)


define_op(
    _FORWARD,
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool with_lse, SymInt chooser)"
    " -> (Tensor, Tensor)",
    _forward,
    forward_fake,
)
define_op(
    _BACKWARD,
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? mask, float scale, "
    "bool with_lse, SymInt chooser) -> (Tensor, Tensor, Tensor)",
    _backward,
    backward_fake,
)
attention_backward_op = refuse_derivative(_BACKWARD, _SECOND_DERIVATIVE)
attention_op = register_autograd(_FORWARD, _differentiate, _save)
