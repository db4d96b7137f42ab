"""GELU after a Linear, whose bias gradient costs no pass of its own.

A Linear's bias is added to every row of its output x = h Wᵀ + b, hence ∂L/∂b is the sum of ∂L/∂x over all rows.
PyTorch takes that sum in a pass of its own over what the GELU's backward has just written. Here the backward adds it up
while it writes: the Linear gets its bias detached, and the GELU answers for its gradient::

    y = gelu(F.linear(h, weight, bias.detach()), bias)

Inside: `gelu` (what one calls), the op ``lightning_videoscale::gelu`` and its backward, an op of its own, and the
interface of the backends. Shapes: N rows of F channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_videoscale.kernels.arguments import check_tensors
from lightning_videoscale.kernels.autograd import NAMESPACE, define_op, refuse_second_derivative, register_autograd
from lightning_videoscale.kernels.backend import BackendName, choose
from lightning_videoscale.kernels.modulation import as_rows

_FORWARD = f"{NAMESPACE}::gelu"
_BACKWARD = f"{NAMESPACE}::gelu_backward"


class GeluVariant(NamedTuple):
    """What decides which backend runs: F, and the dtype of x."""

    columns: int
    dtype: torch.dtype


class GeluBackend(Protocol):
    """A module with these three functions (``kernels/reference/gelu.py`` and its likes) is a backend.

    Rows of x and dy have elements, are contiguous themselves, and begin on 16 bytes if the row is a multiple of those.
    """

    def limit(self, variant: GeluVariant, device: int) -> str | None:
        """Returns why it cannot run forward or backward on this GPU (-1: the CPU), or None if it can."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns gelu(x), (N, F) in x's dtype, contiguous."""

    def backward(
        self, dy: Tensor, x: Tensor, *, sums: bool, again: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns dx, (N, F) in x's dtype, its sum over the rows, and what forward returned.

        The sum is (F,) in float32, float64 for such an x, added up in a fixed order before dx is rounded; None unless
        ``sums``. The third has forward's bits; None unless ``again``.
        """


def gelu(x: Tensor, bias: Tensor | None = None, *, backend: BackendName = "auto") -> Tensor:
    """The tanh-approximate GELU of a Linear's output; its backward also returns the gradient of that Linear's bias.

    y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), ``F.gelu(x, approximate="tanh")``, computed in float32 (float64
    for such an x) and rounded once. Keeps only x for backward. Differentiable once. Autocast leaves it as it is: y has
    x's dtype.

    ``bias`` is not added and its values are not read: it must have been added to every row of x once already, without
    autograd knowing, as in ``x = F.linear(h, weight, bias.detach())``. Its gradient is then ``dx.sum`` over all rows,
    taken from dx before that is rounded, in a fixed order, and cast to the bias's dtype once. If x was computed with
    the bias itself, the gradient is counted twice; if the bias was not added at all, this is not its gradient.

    Args:
        x: (..., F), any floating dtype; rows at any stride.
        bias: (F,), any floating dtype, or None for a Linear without one. A frozen bias costs nothing.
        backend: "auto", or "cuda", "triton" or "reference", which then runs or raises.

    Returns:
        y, (..., F) in x's dtype, contiguous.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes or devices do not fit.
        NotImplementedError: If the backend asked for by name cannot run this.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, section 2.
    """
    check_tensors(x=x, bias=bias)
    check_gelu(x, bias)
    y: Tensor = _op(x, bias, backend)
    return y


def check_gelu(x: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError unless the shapes of x and of the bias fit."""
    if x.ndim == 0:
        raise ValueError("x must have shape (..., F); got ().")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias must be that of the Linear that x comes from, {tuple(x.shape[-1:])}; got {tuple(bias.shape)}."
        )


def _backend(asked: str, rows: Tensor) -> GeluBackend:
    variant = GeluVariant(rows.shape[1], rows.dtype)
    module: GeluBackend = choose("gelu", asked, "gelu", variant, rows.get_device())
    return module


def _forward(x: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    rows = as_rows(x)
    return _backend(backend, rows).forward(rows).view(x.shape)


def _forward_fake(x: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, bias_dtype: torch.dtype | None, again: bool, backend: str) -> list[Tensor]:
    """dx, the bias's gradient where its dtype is given, and y where it is wanted again."""
    if not x.numel():
        return [t.zero_() for t in _backward_fake(dy, x, bias_dtype, again, backend)]
    rows = as_rows(x)
    dy = as_rows(dy.to(x.dtype))  # in which the kernels read it
    dx, dbias, y = _backend(backend, rows).backward(dy, rows, sums=bias_dtype is not None, again=again)
    dbias = None if dbias is None else dbias.to(bias_dtype)
    return [t for t in (dx.view(x.shape), dbias, None if y is None else y.view(x.shape)) if t is not None]


def _backward_fake(dy: Tensor, x: Tensor, bias_dtype: torch.dtype | None, again: bool, backend: str) -> list[Tensor]:
    dbias = [] if bias_dtype is None else [x.new_empty(x.shape[-1], dtype=bias_dtype)]
    return [x.new_empty(x.shape), *dbias, *([x.new_empty(x.shape)] if again else [])]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.backend = inputs
    ctx.save_for_backward(x)
    ctx.bias_dtype = bias.dtype if ctx.needs_input_grad[1] else None


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    dx, *dbias = _backward_op(dy, x, ctx.bias_dtype, False, ctx.backend)
    needs_x, needs_bias = ctx.needs_input_grad[:2]
    return dx if needs_x else None, dbias[0] if needs_bias else None, None


define_op(_FORWARD, "(Tensor x, Tensor? bias, str backend) -> Tensor", _forward, _forward_fake)
define_op(
    _BACKWARD,
    "(Tensor dy, Tensor x, ScalarType? bias_dtype, bool again, str backend) -> Tensor[]",
    _backward,
    _backward_fake,
)
_op = register_autograd(_FORWARD, _differentiate, _save_for_backward)
_backward_op = refuse_second_derivative(_BACKWARD, "gelu")
