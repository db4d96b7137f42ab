"""Splitting a tensor over the sequence-parallel ranks and gathering it again, with the gradient rule.

The rule, the same for DDP, FSDP2 and ZeRO: **gradients are averaged over dp × sp**, and every rank of a group computes
the same loss from the gathered outputs. Hence

- the gradient of a `gather` is this rank's slice *times* the number of ranks, which the averaging takes back;
- the gradient of a `split` is the local gradient padded with zeros; it never gathers, because the averaging adds the
  ranks' slices up.

A parameter before the split, inside the region, after the gather, or fed into the region from outside then receives
exactly the gradient it has on one rank.

Nobody averages the gradient of a model's *input*. `whole_gradient` does, where one is asked for: for guidance, or
because the input is what a split model returned, whose `gather` relies on equal gradients on all ranks.

Each autograd function of a split sequence has ``ctx.returns``, ``"slice"`` or ``"whole"``: `check_loss` reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_videoscale.parallel.context import SequenceContext


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Shares ``length`` tokens out to ``parts`` ranks as evenly as whole tokens allow, longer shares first.

    Raises:
        ValueError: If some rank would receive nothing.
    """
    if length < parts:
        raise ValueError(
            f"A sequence of {length} tokens cannot be split over {parts} ranks. Use a smaller sequence-parallel size "
            "or longer sequences (larger or longer clips)."
        )
    share, rest = divmod(length, parts)
    return tuple(share + (part < rest) for part in range(parts))


def split(x: Tensor, dim: int, context: SequenceContext) -> Tensor:
    """Returns this rank's slice of ``x`` along ``dim`` and records the split table in ``context``.

    Args:
        x: The same tensor on all ranks of the group.
        dim: The sequence dim; any length of at least one token per rank.
        context: The group, and where later exchanges look up the table.
    """
    lengths = split_sizes(x.shape[dim], context.mesh.sp.size)
    context.record = context.record.with_table(lengths)
    sliced: Tensor = _Split.apply(x, dim, lengths, context.mesh.sp.rank)  # type: ignore[no-untyped-call]
    if context.on_split is not None:
        context.on_split(sliced)
    return sliced


def gather(x: Tensor, dim: int, context: SequenceContext) -> Tensor:
    """Returns the whole tensor of which ``x`` is this rank's slice along ``dim``, on every rank of the group.

    Backward that comes to ``x`` brings back the record of this forward pass, before anything in front of the gather is
    recomputed for activation checkpointing.

    Args:
        x: Slice whose length along ``dim`` was recorded by a `split` of the same forward pass.
        dim: The sequence dim.
        context: The group and the record of the pass.
    """
    record = context.record
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda _: context.resume(record))
    whole: Tensor = _Gather.apply(x, dim, record.lengths_of(x.shape[dim]), context)  # type: ignore[no-untyped-call]
    return whole


def whole_gradient(x: Tensor, context: SequenceContext) -> Tensor:
    """Returns ``x``, whose gradient will be that of one rank, on every rank of the group.

    Args:
        x: The same tensor on all ranks of the group, before any `split`.
        context: The group.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    same: Tensor = _WholeGradient.apply(x, context)  # type: ignore[no-untyped-call]
    return same


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: tuple[int, ...], rank: int) -> Tensor:
        ctx.dim, ctx.lengths, ctx.rank, ctx.returns = dim, lengths, rank, "slice"
        # A copy, not a view: a view would keep the whole sequence alive on every rank.
        return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        shape = list(grad.shape)
        shape[ctx.dim] = sum(ctx.lengths)
        padded = grad.new_zeros(shape)
        padded.narrow(ctx.dim, sum(ctx.lengths[: ctx.rank]), ctx.lengths[ctx.rank]).copy_(grad)
        return padded, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: tuple[int, ...], context: SequenceContext) -> Tensor:
        ctx.dim, ctx.lengths, ctx.sp, ctx.returns = dim, lengths, context.mesh.sp, "whole"
        whole = context.transport.all_gather(x.movedim(dim, 0).contiguous(), lengths, ctx.sp)
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        piece = grad.narrow(ctx.dim, sum(ctx.lengths[: ctx.sp.rank]), ctx.lengths[ctx.sp.rank])
        return piece * ctx.sp.size, None, None, None


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: SequenceContext) -> Tensor:
        ctx.context, ctx.returns = context, "whole"
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sp = ctx.context.mesh.sp
        grads = ctx.context.transport.all_gather(grad[None].contiguous(), (1,) * sp.size, sp)
        return grads.mean(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype), None
