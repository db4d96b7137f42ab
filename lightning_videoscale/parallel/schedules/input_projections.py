"""Query, key and value, sent one after the other behind each other's matrix products: what layers call.

What is computed is in `projecting`. Eager code runs it inside an autograd function, compiled code as an op, which takes
the host more time; both have the same forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.autograd import in_dtypes_of_forward
from lightning_videoscale.parallel.derivatives import differentiable_once
from lightning_videoscale.parallel.schedules.across_heads import BeforeNorm, NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.messages import SECOND_DERIVATIVE, Linear, as_computed, heads_first
from lightning_videoscale.parallel.schedules.ops import place_of
from lightning_videoscale.parallel.schedules.projecting import ProjectionCall, kept, project_and_send, send_gradients
from lightning_videoscale.parallel.schedules.projection_op import numbers_of, project_heads_op
from lightning_videoscale.parallel.ulysses import Ulysses


@dataclass(frozen=True)
class Heads:
    """What attention takes, (B, h, S, D) each with tokens before heads in memory, and what was normalised."""

    query: Tensor
    key: Tensor
    value: Tensor
    before_norm: BeforeNorm | None


@dataclass(frozen=True)
class QueryKeyNorm:
    """The norm of query and key, and what it reads beside them."""

    across_heads: NormAcrossHeads
    tensors: NormTensors


def project_heads(
    x: Tensor,
    projections: Sequence[Linear | Tensor],
    norm: QueryKeyNorm | None,
    ulysses: Ulysses,
    heads: int,
    *,
    by_slices: bool = True,
) -> Heads:
    """Projects to query, key and value, gathers the sequence and scatters the heads, normalises and rotates.

    Args:
        x: (B, s, C), this rank's tokens.
        projections: Of query, key and value: a Linear of weight (H · D, C), or what one returned for x, (B, s, H · D).
        norm: Of query and key, over all heads, with the weights for this rank's heads and the tables of all tokens.
            None leaves norms and rotation to the caller, as those of single heads can be.
        ulysses: The group, of two ranks or more; with as many key/value heads as query heads.
        heads: H.
        by_slices: Whether a projection is a matrix product for each rank, or one whose output is copied apart.

    Returns:
        Query, key and value; differentiable once.
    """
    given = [p if isinstance(p, Tensor) else None for p in projections]
    linears = [(None, None) if isinstance(p, Tensor) else p for p in projections]
    inputs = as_computed(x, [t for linear in linears for t in linear])
    of_norm = [None] * 4 if norm is None else [*norm.tensors.weights, *norm.tensors.tables]
    across = None if norm is None else norm.across_heads
    if torch.compiler.is_compiling():
        how = *numbers_of(across), by_slices, *place_of(ulysses)
        query, key, value, *before_norm = project_heads_op(*inputs, *given, *of_norm, *how)
    else:
        with torch.autocast(x.device.type, enabled=False):
            query, key, value, *before_norm = _ProjectHeads.apply(  # type: ignore[no-untyped-call]
                ProjectionCall(ulysses, across, heads, by_slices), *inputs, *given, *of_norm
            )
    return Heads(query, key, value, None if norm is None else BeforeNorm(*before_norm))


def norm_again(heads: BeforeNorm, batch: int, norm: QueryKeyNorm) -> tuple[Tensor, Tensor]:
    """Returns query and key of `project_heads` once more, to the bit; see `kernels.recompute`."""
    query, key = norm.across_heads.forward(heads, norm.tensors)
    return heads_first(query, batch), heads_first(key, batch)


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ProjectionCall, *tensors: Any) -> tuple[Tensor, ...]:
        outputs = project_and_send(call, *tensors)
        ctx.call, ctx.returns = call, "slice"
        ctx.save_for_backward(*kept(tensors, outputs[3:]))
        ctx.mark_non_differentiable(*outputs[3:])
        return outputs

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once, as activation checkpointing wants it
        return None, *send_gradients(ctx.call, gradients[:3], saved, ctx.needs_input_grad[1:]), None, None
