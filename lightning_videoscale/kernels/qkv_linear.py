"""The Linears of query, key and value, whose gradients for their one input are added inside the matrix products.

PyTorch adds the three in passes of their own, which read and write tensors of the input's size. Here each matrix
product adds to what the one before has written, as it writes.

Shapes: N rows of D channels come in; queries, keys and values may have different numbers of channels E.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels.arguments import check_tensors
from lightning_videoscale.kernels.autograd import (
    NAMESPACE,
    define_op,
    each_once,
    in_dtypes_of_forward,
    refuse_second_derivative,
    refuse_transforms,
    under_autocast,
)

_SUM_OF_PRODUCTS = f"{NAMESPACE}::sum_of_products"
_Three = tuple[Tensor, Tensor, Tensor]


def qkv_linear(
    x: Tensor, weights: _Three, biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
) -> _Three:
    """Query, key and value of x: ``F.linear(x, weight, bias)`` each, to the bit; x is kept once.

    x's gradient is rounded at most as often as PyTorch rounds it. Differentiable once.

    Args:
        x: (..., D), any floating dtype.
        weights: (E, D) each, in x's dtype. Under autocast of any, and all is computed in autocast's.
        biases: (E,) each likewise, or None.

    Returns:
        (..., E) each.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit.
    """
    (q, k, v), (q_bias, k_bias, v_bias) = weights, biases
    check_tensors(x=x, q_weight=q, k_weight=k, v_weight=v, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
    for w, b in zip(weights, biases, strict=True):
        if w.ndim != 2 or w.shape[1] != x.shape[-1] or (b is not None and b.shape != w.shape[:1]):
            raise ValueError(
                f"Weights must be (E, {x.shape[-1]}) to fit x of shape {tuple(x.shape)}, and biases (E,); got "
                f"{tuple(w.shape)} and {None if b is None else tuple(b.shape)}."
            )
    parameters = (*weights, *biases)
    refuse_transforms("qkv_linear", x, *parameters)
    if under_autocast(x):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            cast = [None if t is None else t.to(dtype) for t in (x, *parameters)]
            return _QkvLinear.apply(*each_once(*cast))  # type: ignore[no-untyped-call, no-any-return]
    if wrong := [p.dtype for p in parameters if p is not None and p.dtype != x.dtype]:
        raise ValueError(f"Weights and biases must have x's dtype {x.dtype}; got {wrong}.")
    return _QkvLinear.apply(*each_once(x, *parameters))  # type: ignore[no-untyped-call, no-any-return]


class _QkvLinear(torch.autograd.Function):
    """No op of its own, so that a compiler sees the matrix products, but for those that add to one another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:3], parameters[3:]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        rows, flat_x = [dy.reshape(-1, dy.shape[-1]) for dy in gradients], x.reshape(-1, x.shape[-1])
        factors = [factor for pair in zip(rows, weights, strict=True) for factor in pair]
        return (
            _sum_of_products(*factors).view(x.shape) if needs_x else None,
            *(dy.t() @ flat_x if needed else None for dy, needed in zip(rows, needs[:3], strict=True)),
            *(dy.sum(dim=0) if needed else None for dy, needed in zip(rows, needs[3:], strict=True)),
        )


def _sum(dq: Tensor, q_weight: Tensor, dk: Tensor, k_weight: Tensor, dv: Tensor, v_weight: Tensor) -> Tensor:
    return (dq @ q_weight).addmm_(dk, k_weight).addmm_(dv, v_weight)


def _sum_fake(dq: Tensor, q_weight: Tensor, *others: Tensor) -> Tensor:
    return dq.new_empty(dq.shape[0], q_weight.shape[1])


# An op, since a compiler would copy what addmm_ adds to.
define_op(
    _SUM_OF_PRODUCTS,
    "(Tensor dq, Tensor q_weight, Tensor dk, Tensor k_weight, Tensor dv, Tensor v_weight) -> Tensor",
    _sum,
    _sum_fake,
)
_sum_of_products = refuse_second_derivative(_SUM_OF_PRODUCTS, "qkv_linear", returns_list=False)
