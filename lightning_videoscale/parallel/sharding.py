"""Splitting a tensor over the sequence-parallel ranks and gathering it again, with the gradient rule.

The rule, the same for DDP, FSDP2 and ZeRO: **gradients are averaged over dp × sp**, and every rank of a group computes
the same loss from the gathered outputs. Hence

- the gradient of a `gather` is this rank's slice *times* the number of ranks, which the averaging takes back;
- the gradient of a `split` is the local gradient padded with zeros; it never gathers, because the averaging adds the
  ranks' slices up;
- the gradient of a `gather_inside`, in front of a module that sees all tokens and whose output is split again, is the
  sum of all ranks' gradients for this rank's tokens: each rank's covers what became of its own slice only. So is that
  of a `gather_for_users`, which serves both: where all ranks take the same loss of it, the sum is what a `gather` has.

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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.derivatives import refuse_sharded_parameters
from lightning_videoscale.parallel.exchange_op import exchange
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


def split(
    x: Tensor, dim: int, context: SequenceContext, streams: Sequence[str] = ("video",), *, broadcasts: bool = False
) -> Tensor:
    """Returns this rank's tokens of ``x`` along ``dim`` and records the tables of its streams in ``context``.

    Args:
        x: The same tensor on all ranks of the group.
        dim: The dim of the tokens; any length of at least one token per rank, or of fewer for short streams.
        context: The group, and where later exchanges look up the tables.
        streams: Whose tokens they are, one stream behind the other; of all but one the length must be known.
        broadcasts: Whether a dim of size 1 is left whole though its stream is not known yet; that of a known stream is
            left whole in any case.

    Raises:
        ValueError: If the tensor is not as long as its streams are.
    """
    size, record = x.shape[dim], context.record
    known = {name: record.tokens(name) for name in streams if name in record.tables}
    new = [name for name in streams if name not in known]
    tokens = sum(known.values())
    if size == 1 and (broadcasts or len(new) > 1 or (tokens > 0 if new else tokens != 1)):
        return x
    if len(new) > 1:
        raise ValueError(f"How {size} tokens share out to {new} is not known: split one of them before.")
    for name in new:
        known[name] = size - sum(known.values())
        record = record.with_stream(name, known[name], _table(known[name], name, context))
    totals = [known[name] for name in streams]
    if sum(totals) != size or min(totals) < 0:
        expected = " + ".join(f"{total} of {name}" for total, name in zip(totals, streams, strict=True))
        again = (
            " It is split already, as where a network calls one block twice: give it another block that shares the "
            "parameters (a.weight = b.weight) and not the module."
        )
        said = f"It has {size} tokens along dim {dim}, and the streams of this forward pass {expected}."
        raise ValueError(said + again * (size == record.lengths(streams)[context.mesh.sp.rank]))
    context.record = record
    pieces = x.split(totals, dim) if len(streams) > 1 else (x,)
    slices = [
        _Split.apply(_padded(piece, dim, sum(table)), _SliceLayout(dim, table, context))  # type: ignore[no-untyped-call]
        for piece, table in zip(pieces, (record.lengths((name,)) for name in streams), strict=True)
    ]
    sliced: Tensor = slices[0] if len(slices) == 1 else torch.cat(slices, dim)
    if context.on_split is not None:
        context.on_split(sliced)
    return sliced


def share_of_length(tokens: int, stream: str, context: SequenceContext) -> int:
    """Returns how many tokens of a stream this rank has, which may be split later and has so many in all.

    Raises:
        ValueError: If the stream was split already and had another length.
    """
    context.record = context.record.with_stream(stream, tokens, _table(tokens, stream, context))
    return context.lengths((stream,))[context.mesh.sp.rank]


def _table(tokens: int, stream: str, context: SequenceContext) -> tuple[int, ...]:
    parts = context.mesh.sp.size
    if tokens == 0 and stream in context.short_streams:
        return (0,) * parts
    return split_sizes(max(tokens, parts) if stream in context.short_streams else tokens, parts)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def gather(x: Tensor, dim: int, context: SequenceContext, streams: Sequence[str] = ("video",)) -> Tensor:
    """Returns the whole tensor of which ``x`` is this rank's slice along ``dim``, on every rank of the group.

    Backward that comes to ``x`` brings back the record of this forward pass, before anything in front of the gather is
    recomputed for activation checkpointing.

    Args:
        x: This rank's tokens of the streams, as a `split` of the same forward pass left them.
        dim: The dim of the tokens.
        context: The group and the record of the pass.
        streams: Whose tokens they are.

    Raises:
        ValueError: If ``x`` is not as long as this rank's tokens of the streams.
    """
    context.resume_behind(x)
    return _gathered(_Gather, x, dim, context, streams)


def gather_inside(x: Tensor, dim: int, context: SequenceContext, streams: Sequence[str] = ("video",)) -> Tensor:
    """As `gather`, in front of a module whose outputs are split again: the ranks' gradients differ, and are summed."""
    return _gathered(_GatherInside, x, dim, context, streams)


def gather_for_users(x: Tensor, dim: int, context: SequenceContext, streams: Sequence[str] = ("video",)) -> Tensor:
    """As `gather`, of which nobody knows what it is for: a loss, or what goes on with the tokens of each rank."""
    context.resume_behind(x)
    return _gathered(_GatherForUsers, x, dim, context, streams)


def gradient_of_slices(
    grad: Tensor, dim: int, context: SequenceContext, tables: Sequence[tuple[int, ...]], counts: Sequence[int]
) -> Tensor:
    """Returns the gradient of `gather_inside`, given that of what it returned.

    Args:
        grad: Of the tokens of all streams, one stream behind the other.
        dim: The dim of the tokens.
        context: The group.
        tables: Of each stream, the tokens of each rank.
        counts: Of each stream, its tokens, which may be fewer than those of the ranks together.
    """
    pieces = zip(grad.split(list(counts), dim), tables, strict=True)
    sums = [
        _SumOfSlices.apply(_padded(piece, dim, sum(table)), _SliceLayout(dim, table, context))  # type: ignore[no-untyped-call]
        for piece, table in pieces
        if any(table)
    ]
    return torch.cat(sums, dim)


def _gathered(
    function: type[torch.autograd.Function], x: Tensor, dim: int, context: SequenceContext, streams: Sequence[str]
) -> Tensor:
    record = context.record
    tables = [record.lengths((name,)) for name in streams]
    mine = [table[context.mesh.sp.rank] for table in tables]
    objection = None
    if x.shape[dim] != sum(mine):
        expected = " + ".join(f"{count} of {name}" for count, name in zip(mine, streams, strict=True))
        objection = (
            f"To be gathered are {x.shape[dim]} tokens along dim {dim}; this rank's share of the forward pass is "
            f"{expected}."
        )
    if context.on_exchange is not None:
        context.on_exchange(f"a gather of {', '.join(streams)}", objection)
    if objection is not None:
        raise ValueError(objection)
    pieces = x.split(mine, dim) if len(streams) > 1 else (x,)
    whole = [
        _without_missing(function.apply(piece, _SliceLayout(dim, table, context)), dim, record.tokens(name))
        for piece, table, name in zip(pieces, tables, streams, strict=True)
        if any(table)
    ]
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim)


def _without_missing(x: Tensor, dim: int, tokens: int) -> Tensor:
    return x if x.shape[dim] == tokens else x.narrow(dim, 0, tokens)


def whole_gradient(x: Tensor, context: SequenceContext) -> Tensor:
    """Returns ``x``, not split yet, whose gradient will be that of one rank, on every rank of the group."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    same: Tensor = _WholeGradient.apply(x, context)  # type: ignore[no-untyped-call]
    return same


class _SliceLayout(NamedTuple):
    """Where the slices of a sequence are: its dim, the tokens of each rank, and what the ranks share."""

    dim: int
    lengths: tuple[int, ...]
    context: SequenceContext

    @property
    def sp(self) -> Axis:
        """The ranks."""
        return self.context.mesh.sp

    def slice_of(self, whole: Tensor) -> Tensor:
        """A view of this rank's slice."""
        rank = self.sp.rank
        return whole.narrow(self.dim, sum(self.lengths[:rank]), self.lengths[rank])

    def whole_of(self, x: Tensor) -> Tensor:
        """All ranks' slices, one behind the other."""
        whole = self.context.transport.all_gather(x.movedim(self.dim, 0).contiguous(), self.lengths, self.sp)
        return whole.movedim(0, self.dim).contiguous()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _SliceLayout) -> Tensor:
        ctx.place, ctx.returns = place, "slice"
        # A copy, not a view: a view would keep the whole sequence alive on every rank.
        return place.slice_of(x).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Pad.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _Pad(torch.autograd.Function):
    """The gradient of a split."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, place: _SliceLayout) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, place: _SliceLayout) -> Tensor:
        ctx.place, ctx.returns = place, "whole"
        return place.whole_of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ScaledSlice.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _ScaledSlice(torch.autograd.Function):
    """The gradient of a gather."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, place: _SliceLayout) -> Tensor:
        ctx.place, ctx.returns = place, "slice"
        return place.slice_of(grad) * place.sp.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _GatherInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _SliceLayout) -> Tensor:
        ctx.place, ctx.returns = place, "slice"  # a loss of it would be counted by every rank
        return place.whole_of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOfSlices.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _GatherForUsers(_GatherInside):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _SliceLayout) -> Tensor:
        whole = _GatherInside.forward(ctx, x, place)
        ctx.returns = "whole"
        return whole


class _SumOfSlices(torch.autograd.Function):
    """The gradient of `gather_inside`: of each rank's tokens, what all ranks' gradients are together."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, place: _SliceLayout) -> Tensor:
        ctx.place, ctx.returns = place, "slice"
        sp, tokens_first = place.sp, grad.movedim(place.dim, 0).contiguous()
        per_token, mine = tokens_first[0].numel(), place.lengths[sp.rank]
        send, receive = [length * per_token for length in place.lengths], [mine * per_token] * sp.size
        context = place.context
        received = exchange(tokens_first.view(-1), send, receive, sp, context.transport, context.number)
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = received.view(sp.size, mine, *tokens_first.shape[1:]).sum(0, dtype=wide).to(grad.dtype)
        return summed.movedim(0, place.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherInside.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


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
