"""Query, key and value that travel one after the other, behind each other's matrix products. Forward and backward.

The weight's rows that make one rank's heads are one matrix product, whose output is that rank's message: nothing is
packed. In backward the gradients of heads lie as they are sent. The value's goes first, as the norms of query and key
need a sum over ranks, and each weight's gradient is computed while what follows it travels.

Under "overlap" a projection is one matrix product, whose output is copied apart into messages; all else is the same.

Where a Linear is more than its weight and bias (LoRA, hooks), what it returns is sent in its place. So which messages
there are, and in which order, does not depend on what a rank has in a Linear's place.

Rounding is that of serial code: no sum is split that is not split there. For the shapes see `messages`; C are the
channels of the input.
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
from lightning_videoscale.parallel.schedules.messages import (
    SECOND_DERIVATIVE,
    HeadSource,
    Linear,
    as_computed,
    heads_first,
    return_tokens,
    rows_of,
    scatter_heads_of,
    send_to_all,
    sum_over_ranks,
)
from lightning_videoscale.parallel.ulysses import Ulysses


@dataclass(frozen=True)
class Heads:
    """What attention takes, (B, h, S, D) each with tokens before heads in memory, and what was normalised."""

    query: Tensor
    key: Tensor
    value: Tensor
    before_norm: BeforeNorm | None


@dataclass(frozen=True)
class Norm:
    """The norm of query and key, and what it reads beside them."""

    across_heads: NormAcrossHeads
    tensors: NormTensors


def project_heads(
    x: Tensor,
    projections: Sequence[Linear | Tensor],
    norm: Norm | None,
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
    with torch.autocast(x.device.type, enabled=False):
        query, key, value, *before_norm = _ProjectHeads.apply(  # type: ignore[no-untyped-call]
            (ulysses, None if norm is None else norm.across_heads, heads, by_slices), *inputs, *given, *of_norm
        )
    return Heads(query, key, value, None if norm is None else BeforeNorm(*before_norm))


def norm_again(heads: BeforeNorm, batch: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Returns query and key of `project_heads` once more, to the bit; see `kernels.recompute`."""
    query, key = norm.across_heads.forward(heads, norm.tensors)
    return heads_first(query, batch), heads_first(key, batch)


class _ProjectHeads(torch.autograd.Function):
    """The tensors are x; weight and bias of query, key, value; their results; the norm's two weights and two tables."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Ulysses, NormAcrossHeads | None, int, bool], *tensors: Any) -> tuple[Tensor, ...]:
        ulysses, norm, heads, by_slices = call
        x, parameters, results, of_norm = tensors[0], tensors[1:7], tensors[7:10], tensors[10:]
        batch, rows = x.shape[0], x.transpose(0, 1).reshape(-1, x.shape[2])
        linears = zip(parameters[0::2], parameters[1::2], results, strict=True)
        sources = [HeadSource(rows, weight, bias, result, heads) for weight, bias, result in linears]
        query, key = (scatter_heads_of(source, batch, ulysses, by_slices=by_slices) for source in sources[:2])
        if norm is not None:
            statistics = send_to_all(norm.square_sums(query.pieces, key.pieces), ulysses, batch)
        value = scatter_heads_of(sources[2], batch, ulysses, by_slices=by_slices)
        qk = query.received(ulysses, batch), key.received(ulysses, batch)
        before_norm: tuple[Tensor, ...] = ()
        if norm is not None:
            before_norm = BeforeNorm(*qk, norm.rstds(ulysses.transport.wait(statistics).view(-1, 2)))
            qk = norm.forward(before_norm, NormTensors(of_norm[:2], of_norm[2:]))
        ctx.call = call
        ctx.save_for_backward(x, *parameters[0::2], *of_norm, *before_norm)
        ctx.mark_non_differentiable(*before_norm)
        return *(heads_first(each, batch) for each in (*qk, value.received(ulysses, batch))), *before_norm

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (ulysses, norm, *_), saved = ctx.call, ctx.saved_tensors  # read once, as activation checkpointing wants it
        x, weights, tensors = saved[0], saved[1:4], NormTensors(saved[4:6], saved[6:8])
        dq, dk, dv = (rows_of(g) for g in gradients[:3])
        value = return_tokens(dv, ulysses, x.shape[0])
        if norm is not None:
            before_norm = BeforeNorm(*saved[8:])
            sums = sum_over_ranks(norm.gradient_sums(dq, dk, before_norm, tensors), ulysses)
        home = _Home(x.flatten(0, 1), weights, ctx.needs_input_grad[2:8])
        home.take(2, value())
        of_norm: Sequence[Tensor | None] = (None, None)
        if norm is not None:
            dq, dk, *of_norm = norm.backward(dq, dk, before_norm, sums(), tensors)
        key, query = (return_tokens(rows, ulysses, x.shape[0]) for rows in (dk, dq))
        needs_x, needs = ctx.needs_input_grad[1], ctx.needs_input_grad[8:13]
        if needs_x:
            home.add_to_input(2)
        for i, arriving in ((1, key), (0, query)):
            home.take(i, arriving())
            if needs_x:
                home.add_to_input(i)
        dx = None if home.of_input is None else home.of_input.view_as(x)
        wanted = [g if needed else None for g, needed in zip((*home.arrived, *of_norm), needs, strict=True)]
        return None, dx, *home.of_parameters, *wanted, None, None


class _Home:
    """Gradients of this rank's tokens, as those of query, key and value come back one by one.

    Attributes:
        arrived: (B, s, H · D) of each of the three.
        of_parameters: Of weight and bias of each.
        of_input: (B · s, C), of those that were added so far; None if nothing was.
    """

    def __init__(self, x: Tensor, weights: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        self._x, self._weights, self._needs = x, weights, needs
        self.arrived: list[Tensor] = [x] * 3
        self.of_parameters: list[Tensor | None] = [None] * 6
        self.of_input: Tensor | None = None

    def take(self, i: int, dy: Tensor) -> None:
        """Computes what a Linear's parameters need; other messages travel meanwhile."""
        self.arrived[i], flat = dy, dy.flatten(0, 1)
        self.of_parameters[2 * i] = flat.t() @ self._x if self._needs[2 * i] else None
        self.of_parameters[2 * i + 1] = flat.sum(0) if self._needs[2 * i + 1] else None

    def add_to_input(self, i: int) -> None:
        """Adds the gradient of the input through a Linear, as it is computed."""
        flat, weight = self.arrived[i].flatten(0, 1), self._weights[i]
        if weight is not None:
            self.of_input = flat @ weight if self.of_input is None else self.of_input.addmm_(flat, weight)
