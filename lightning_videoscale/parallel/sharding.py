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

Backwards are autograd functions themselves, so that gradients of inputs can be differentiated again: a gradient penalty
with respect to inputs. What a second backward computes of each follows from the same rule. All ranks compute the same
penalty of whole gradients, hence the gradient of the mean over ranks is taken as it is, that of the padding is the
rank's slice, and that of the scaled slice is gathered.

Each autograd function of a split sequence has ``ctx.returns``, ``"slice"`` or ``"whole"``: `check_loss` reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.derivatives import refuse_sharded_parameters
from lightning_videoscale.parallel.mesh import Axis


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
    sliced: Tensor = _Split.apply(x, _Place(dim, lengths, context.mesh.sp, context))  # type: ignore[no-untyped-call]
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
    place = _Place(dim, record.lengths_of(x.shape[dim]), context.mesh.sp, context)
    whole: Tensor = _Gather.apply(x, place)  # type: ignore[no-untyped-call]
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


class _Place(NamedTuple):
    """Where the slices of a sequence are: its dim, the tokens of each rank, the ranks and what they share."""

    dim: int
    lengths: tuple[int, ...]
    sp: Axis
    context: SequenceContext

    def slice_of(self, whole: Tensor) -> Tensor:
        """A view of this rank's slice."""
        rank = self.sp.rank
        return whole.narrow(self.dim, sum(self.lengths[:rank]), self.lengths[rank])


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _Place) -> Tensor:
        ctx.place, ctx.returns = place, "slice"
        # A copy, not a view: a view would keep the whole sequence alive on every rank.
        return place.slice_of(x).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Pad.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _Pad(torch.autograd.Function):
    """The gradient of a split."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, place: _Place) -> Tensor:
        # Here a second backward will enter what was split.
        ctx.place, ctx.record, ctx.returns = place, place.context.record, "slice"
        shape = list(grad.shape)
        shape[place.dim] = sum(place.lengths)
        padded = grad.new_zeros(shape)
        place.slice_of(padded).copy_(grad)
        return padded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_sharded_parameters(ctx.place.context.network())
        ctx.place.context.resume(ctx.record)
        return _Split.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _Place) -> Tensor:
        ctx.place, ctx.returns = place, "whole"
        whole = place.context.transport.all_gather(x.movedim(place.dim, 0).contiguous(), place.lengths, place.sp)
        return whole.movedim(0, place.dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ScaledSlice.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _ScaledSlice(torch.autograd.Function):
    """The gradient of a gather."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, place: _Place) -> Tensor:
        ctx.place, ctx.returns = place, "slice"
        return place.slice_of(grad) * place.sp.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: SequenceContext) -> Tensor:
        ctx.context, ctx.returns = context, "whole"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Mean.apply(grad, ctx.context), None  # type: ignore[no-untyped-call]


class _Mean(torch.autograd.Function):
    """The gradient of `whole_gradient`: the mean over the ranks, which all of them have."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, context: SequenceContext) -> Tensor:
        ctx.context, ctx.returns = context, "whole"
        sp = context.mesh.sp
        grads = context.transport.all_gather(grad[None].contiguous(), (1,) * sp.size, sp)
        return grads.mean(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_sharded_parameters(ctx.context.network())
        return _WholeGradient.apply(grad, ctx.context), None  # type: ignore[no-untyped-call]
