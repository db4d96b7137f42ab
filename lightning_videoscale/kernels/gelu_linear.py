"""GELU and the Linear after it, which together keep for backward only what the GELU is given.

Apart, the GELU keeps its input for its own gradient and the Linear keeps the GELU's output, as large, for that of its
weight. Yet the pass that computes the first reads all that the second is made of. Here it writes the output once more,
for a quarter of its traffic on top, and half of what a feed-forward keeps is gone::

    x = F.linear(h, weight_in, bias_in.detach())
    z = gelu_linear(x, weight_out, bias_out, x_bias=bias_in)

Shapes: N rows of F channels inside the feed-forward, D outside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels.arguments import check_tensors
from lightning_videoscale.kernels.autograd import each_once, in_dtypes_of_forward, refuse_transforms, under_autocast
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.gelu import check_gelu


def gelu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_bias: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """``F.linear(gelu(x, x_bias), weight, bias)``, which keeps x alone.

    y = gelu(x) is computed again in backward, to the bit, by the kernel that computes x's gradient. It is not computed
    where the weight is frozen. Differentiable once.

    Args:
        x: (..., F), any floating dtype; rows at any stride.
        weight: (D, F) in x's dtype. Under autocast of any, and computed with in x's.
        bias: (D,) likewise, or None.
        x_bias: (F,), the bias of the Linear that x comes from, added already and detached there; see `gelu`.
        backend: "auto", or "cuda", "triton" or "reference", which then runs or raises.

    Returns:
        z, (..., D) in x's dtype.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit.
        NotImplementedError: If the backend asked for by name cannot run this.
    """
    check_tensors(x=x, weight=weight, bias=bias, x_bias=x_bias)
    check_gelu(x, x_bias)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"weight must be (D, {x.shape[-1]}) to fit x of shape {tuple(x.shape)}, and bias (D,); got "
            f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}."
        )
    if under_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            bias = None if bias is None else bias.to(x.dtype)
            return gelu_linear(x, weight.to(x.dtype), bias, x_bias=x_bias, backend=backend)
    parameters = [p for p in (weight, bias) if p is not None]
    if any(p.dtype != x.dtype for p in parameters):
        raise ValueError(f"weight and bias must have x's dtype {x.dtype}; got {[p.dtype for p in parameters]}.")
    refuse_transforms("gelu_linear", x, x_bias, weight, bias)
    z: Tensor = _GeluLinear.apply(*each_once(x, x_bias, weight, bias), backend)  # type: ignore[no-untyped-call]
    return z


class _GeluLinear(torch.autograd.Function):
    """No op of its own, so that a compiler sees the matrix products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_bias: Tensor | None, weight: Tensor, bias: Tensor | None, backend: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.x_bias_dtype = None if x_bias is None else x_bias.dtype
        ctx.backend = backend
        return F.linear(torch.ops.lightning_videoscale.gelu(x, None, backend), weight, bias)

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_x_bias, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        dz = dz.reshape(-1, weight.shape[0])
        dx, *others = torch.ops.lightning_videoscale.gelu_backward(
            (dz @ weight).view(x.shape), x, ctx.x_bias_dtype if needs_x_bias else None, needs_weight, ctx.backend
        )
        return (
            dx if needs_x else None,
            others[0] if needs_x_bias else None,
            dz.t() @ others[-1].view(-1, x.shape[-1]) if needs_weight else None,
            dz.sum(dim=0) if needs_bias else None,
            None,
        )
