"""What a case came to, and how far a result may be from the oracle's.

The law (docs/kernels.md): everything is computed wide (float32; float64 for such activations) and rounded once, to the
dtype of the result. Hence, element by element, with u the unit roundoff of the result's dtype::

    |got - exact| <= u · |exact| + (1 + u) · bound + half the smallest number of that dtype

``bound`` is what may happen before that rounding: a multiple of the wide dtype's unit roundoff times the magnitude of
the terms that were added, which the oracle works out beside its result; and, where the law rounds in between (eager's,
the norm before its rotation), so many roundings of the activations' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Half the smallest number above 0, which is what rounding may cost there; kernels may flush float32's to 0.
SMALLEST = {torch.float64: 0.0, torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}
_ENOUGH = 4096  # elements, for two L2 errors to be alike where some roundings fall the other way


class Expected(NamedTuple):
    """One result beside the oracle's.

    Attributes:
        name: Of the output, or "d" and the argument's.
        got: What the op returned; None for a gradient that it did not.
        exact: In float64.
        bound: What may happen before the result is rounded, as ``exact``.
        dtype: Which it should have.
        plain: Where the law rounds in between: what PyTorch makes of it, operation by operation in that dtype. The L2
            error may be at most 1.05 times as large.
    """

    name: str
    got: Tensor | None
    exact: Tensor
    bound: Tensor
    dtype: torch.dtype
    plain: Tensor | None = None


class Outcome(NamedTuple):
    """What running an op gave: its outputs, the gradients by name (of those that were asked for), the cotangents."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    cotangents: tuple[Tensor | None, ...]


def added_up(terms: int, wide: torch.dtype) -> float:
    """What adding so many terms may cost, relative to the sum of their magnitudes.

    16 for the operations before (exponentials, reciprocal roots, a tree over the channels), and √terms for a chain of
    additions, whose roundings are as often up as down.
    """
    return (16 + 2 * math.sqrt(terms)) * ROUNDOFF[wide]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def excess(expected: Expected, truncates: bool) -> Tensor:
    """The largest error over what is allowed: more than 1 is wrong. NaN counts as infinite; no synchronisation.

    Args:
        expected: A result of the right shape.
        truncates: Whether bfloat16 is cut off rather than rounded, as Triton's interpreter does.
    """
    got, exact, dtype = expected.got, expected.exact.detach(), expected.dtype
    if got is None:
        got = torch.zeros_like(exact)
    if not exact.numel():
        return exact.new_zeros(())
    u, times = ROUNDOFF[dtype], 2 if truncates and dtype is torch.bfloat16 else 1
    allowed = times * (u * exact.abs() + (1 + u) * expected.bound) + SMALLEST[dtype]
    # Where allowed is 0, only 0 is right.
    over = (got.detach().double() - exact).abs() / allowed.clamp_min(1e-300)
    overflows = exact.abs() + allowed >= torch.finfo(dtype).max
    worst = torch.nan_to_num(over.masked_fill(overflows, 0.0), nan=math.inf).max()
    if expected.plain is None or exact.numel() < _ENOUGH:
        return worst
    errors = [(x.detach().double() - exact).masked_fill(overflows, 0.0).norm() for x in (got, expected.plain)]
    return torch.maximum(worst, errors[0] / (1.05 * errors[1] + expected.bound.norm() * 1e-3).clamp_min(1e-300))


def misfit(expected: Expected) -> str | None:
    """Whether shape or dtype of a result is wrong already."""
    got = expected.got
    if got is None or (got.shape == expected.exact.shape and got.dtype == expected.dtype):
        return None
    return f"{expected.name} is {got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.exact.shape)}"


def differentiate(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of leaves; None of all where no output has a cotangent."""
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    if not pairs or not leaves:
        return (None,) * len(leaves)
    used, given = zip(*pairs, strict=True)
    return torch.autograd.grad(used, leaves, given, allow_unused=True)


def run(
    op: Callable[..., Any], arguments: dict[str, Any], used: tuple[bool, ...], cotangents: tuple[Tensor, ...]
) -> Outcome:
    """Calls an op and differentiates the outputs that are used.

    Args:
        op: Called with ``arguments`` by name.
        arguments: Tensors, those that gradients are taken of being leaves, and settings.
        used: Which outputs reach the loss.
        cotangents: Of all outputs.
    """
    result = op(**arguments)
    outputs = result if isinstance(result, tuple) else (result,)
    given = tuple(c if use and y.requires_grad else None for y, c, use in zip(outputs, cotangents, used, strict=True))
    trained = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    gradients = differentiate(outputs, given, list(trained.values()))
    return Outcome(outputs, dict(zip(trained, gradients, strict=True)), given)
