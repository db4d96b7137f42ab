"""Ulysses: trade sequence slices for heads, and back (Jacobs et al., DeepSpeed Ulysses, 2023).

Shapes: B batch, s tokens of this rank, S tokens of all ranks, H heads, h heads of this rank, D head dim.

`scatter_heads`  (B, s, H, D) -> (B, S, h, D)   before attention
`gather_heads`   (B, S, h, D) -> (B, s, H, D)   after it

For query heads each is the other's inverse and therefore its gradient. Lengths and heads need not divide by the number
of ranks. Key/value heads may be fewer than query heads and than ranks: each goes to every rank that has one of its
query heads, and the gradients that come back from there are added up (in fp32, of parts rounded to the gradient's
dtype: at most one rounding per part more than on one rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.sharding import split_sizes
from lightning_videoscale.parallel.transport import Transport

_Shares = tuple[range, ...]


@dataclass(frozen=True)
class ExchangeTable:
    """Which tokens the ranks hold before, and which heads after.

    Attributes:
        axis: The ranks that exchange.
        tokens: Tokens of each rank, one behind the other.
        heads: Heads of each rank; those of neighbours overlap where a key/value head serves both.
    """

    axis: Axis
    tokens: _Shares
    heads: _Shares

    @classmethod
    def create(cls, axis: Axis, lengths: tuple[int, ...], heads: int) -> ExchangeTable:
        """Shares ``heads`` query heads out over the ranks of ``axis``, which hold ``lengths`` tokens.

        Raises:
            ValueError: If there are fewer heads than ranks.
        """
        check_heads(heads, axis.size)
        return cls(axis, _one_behind_the_other(lengths), _one_behind_the_other(split_sizes(heads, axis.size)))

    def of_key_value(self, group: int) -> ExchangeTable:
        """The table of the key/value heads, of which each serves ``group`` consecutive query heads."""
        served = (range(heads.start // group, (heads.stop - 1) // group + 1) for heads in self.heads)
        return ExchangeTable(self.axis, self.tokens, tuple(served))

    def repeats(self, group: int) -> tuple[int, ...]:
        """How many of this rank's query heads each of this rank's key/value heads serves, in their order."""
        serving = [head // group for head in self.heads[self.axis.rank]]
        return tuple(serving.count(head) for head in sorted(set(serving)))


def check_heads(heads: int, ulysses_size: int) -> None:
    """Raises a ``ValueError`` with the way out if some rank would have no head."""
    if heads < ulysses_size:
        raise ValueError(
            f"Attention with {heads} heads cannot be spread over ulysses_size={ulysses_size} ranks: every rank needs "
            f"at least one head. Use ulysses_size <= {heads}, and ring_size for more ranks."
        )


def scatter_heads(
    tensors: tuple[Tensor, ...], tables: tuple[ExchangeTable, ...], transport: Transport
) -> tuple[Tensor, ...]:
    """Gathers the sequence and scatters the heads of each tensor, all messages in flight together.

    Args:
        tensors: Each (B, s, H, D), with s and H as its table has them.
        tables: The tokens and heads of all ranks, for each tensor.
        transport: How bytes travel.

    Returns:
        Each tensor as (B, S, h, D).
    """
    if tables[0].axis.size == 1:
        return tensors
    out: tuple[Tensor, ...] = _ScatterHeads.apply(tables, transport, *tensors)  # type: ignore[no-untyped-call]
    return out


def gather_heads(out: Tensor, table: ExchangeTable, transport: Transport) -> Tensor:
    """Scatters the sequence and gathers the heads: the inverse of `scatter_heads` for query heads.

    Args:
        out: (B, S, h, D).
        table: The tokens and query heads of all ranks.
        transport: How bytes travel.

    Returns:
        (B, s, H, D).
    """
    if table.axis.size == 1:
        return out
    gathered: Tensor = _GatherHeads.apply(table, transport, out)  # type: ignore[no-untyped-call]
    return gathered


def repeat_heads(x: Tensor, repeats: tuple[int, ...]) -> Tensor:
    """Repeats head i of (B, S, h, D) ``repeats[i]`` times, so that every query head finds its key/value head."""
    if set(repeats) == {1}:
        return x
    heads = zip(x.split(1, 2), repeats, strict=True)
    return torch.cat([head.expand(-1, -1, times, -1) for head, times in heads], 2)


def sum_heads(grad: Tensor, repeats: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The gradient of `repeat_heads`, added up in ``dtype``."""
    if set(repeats) == {1}:
        return grad
    return torch.stack([copies.sum(2, dtype=dtype) for copies in grad.split(repeats, 2)], 2)


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tables: tuple[ExchangeTable, ...], transport: Transport, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tables, ctx.transport = tables, transport
        pending = [
            _Exchange(x, 2, table.heads, 1, table.tokens, table.axis, transport)
            for x, table in zip(tensors, tables, strict=True)
        ]
        return tuple(exchange.result() for exchange in pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        pending = [
            _Exchange(grad, 1, table.tokens, 2, table.heads, table.axis, ctx.transport)
            for grad, table in zip(grads, ctx.tables, strict=True)
        ]
        return None, None, *(exchange.result() for exchange in pending)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: ExchangeTable, transport: Transport, out: Tensor) -> Tensor:
        ctx.table, ctx.transport = table, transport
        return _Exchange(out, 1, table.tokens, 2, table.heads, table.axis, transport).result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        table = ctx.table
        return None, None, _Exchange(grad, 2, table.heads, 1, table.tokens, table.axis, ctx.transport).result()


class _Exchange:
    """Scatters one dim of a tensor and gathers another; under way from its construction on."""

    def __init__(
        self,
        x: Tensor,
        scatter_dim: int,
        scattered: _Shares,
        gather_dim: int,
        gathered: _Shares,
        axis: Axis,
        transport: Transport,
    ) -> None:
        self._dim, self._shares, self._transport = gather_dim, gathered, transport
        # The piece for rank p is x's share p of scatter_dim; the piece from rank p has that rank's share of gather_dim.
        self._shapes = []
        for share in gathered:
            shape = list(x.shape)
            shape[scatter_dim], shape[gather_dim] = len(scattered[axis.rank]), len(share)
            self._shapes.append(shape)
        self._receive = [prod(shape) for shape in self._shapes]
        message, send = _pack(x, scatter_dim, scattered)
        self._pending = transport.all_to_all(message, send, self._receive, axis)

    def result(self) -> Tensor:
        """Waits, and puts every received piece in its place; where places overlap, the pieces are added up."""
        message, dim, shapes = self._transport.wait(self._pending), self._dim, self._shapes
        whole = shapes[0].copy()
        whole[dim] = self._shares[-1].stop
        if sum(map(len, self._shares)) == whole[dim]:
            if prod(whole[:dim]) == 1:  # they already lie one behind the other (B = 1): nothing to copy
                return message.view(whole)
            pieces = zip(message.split(self._receive), shapes, strict=True)
            return torch.cat([piece.view(shape) for piece, shape in pieces], dim)
        total = message.new_zeros(whole, dtype=torch.promote_types(message.dtype, torch.float32))
        for piece, shape, share in zip(message.split(self._receive), shapes, self._shares, strict=True):
            total.narrow(dim, share.start, len(share)).add_(piece.view(shape))
        return total.to(message.dtype)


def _pack(x: Tensor, dim: int, shares: _Shares) -> tuple[Tensor, list[int]]:
    """Writes x's shares along ``dim`` one behind the other, reading x once."""
    pieces = [x.narrow(dim, share.start, len(share)) for share in shares]
    send = [piece.numel() for piece in pieces]
    message = x.new_empty(sum(send))
    for target, piece in zip(message.split(send), pieces, strict=True):
        target.view(piece.shape).copy_(piece)
    return message, send


def _one_behind_the_other(sizes: tuple[int, ...]) -> _Shares:
    return tuple(range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))
