"""Ulysses: trade sequence slices for heads, and back (Jacobs et al., DeepSpeed Ulysses, 2023).

Shapes: B batch, s tokens of this rank, S tokens of all ranks, H heads, h heads of this rank, D head dim.

`scatter_heads`  (B, s, H, D) -> (B, S, h, D)   before attention
`gather_heads`   (B, S, h, D) -> (B, s, H, D)   after it

Each is the other's inverse and therefore its gradient. Lengths and heads need not divide by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.sharding import split_sizes
from lightning_videoscale.parallel.transport import Transport


@dataclass(frozen=True)
class ExchangeTable:
    """Who holds how many tokens before, and how many heads after.

    Attributes:
        axis: The ranks that exchange.
        lengths: Tokens of each rank.
        heads: Heads of each rank.
    """

    axis: Axis
    lengths: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def create(cls, axis: Axis, lengths: tuple[int, ...], heads: int) -> ExchangeTable:
        """Shares ``heads`` out over the ranks of ``axis``.

        Raises:
            ValueError: If there are fewer heads than ranks.
        """
        check_heads(heads, axis.size)
        return cls(axis, lengths, split_sizes(heads, axis.size))


def check_heads(heads: int, ulysses_size: int) -> None:
    """Raises a ``ValueError`` with the way out if some rank would have no head."""
    if heads < ulysses_size:
        raise ValueError(
            f"Attention with {heads} heads cannot be spread over ulysses_size={ulysses_size} ranks: every rank needs "
            f"at least one head. Use ulysses_size <= {heads}."
        )


def scatter_heads(tensors: tuple[Tensor, ...], table: ExchangeTable, transport: Transport) -> tuple[Tensor, ...]:
    """Gathers the sequence and scatters the heads of each tensor, all messages in flight together.

    Args:
        tensors: Each (B, s, H, D) with ``s = table.lengths[rank]``.
        table: The lengths and heads of all ranks.
        transport: How bytes travel.

    Returns:
        Each tensor as (B, S, h, D) with ``h = table.heads[rank]``.
    """
    if table.axis.size == 1:
        return tensors
    out: tuple[Tensor, ...] = _ScatterHeads.apply(table, transport, *tensors)  # type: ignore[no-untyped-call]
    return out


def gather_heads(tensors: tuple[Tensor, ...], table: ExchangeTable, transport: Transport) -> tuple[Tensor, ...]:
    """Scatters the sequence and gathers the heads of each tensor: the inverse of `scatter_heads`.

    Args:
        tensors: Each (B, S, h, D).
        table: The lengths and heads of all ranks.
        transport: How bytes travel.

    Returns:
        Each tensor as (B, s, H, D).
    """
    if table.axis.size == 1:
        return tensors
    out: tuple[Tensor, ...] = _GatherHeads.apply(table, transport, *tensors)  # type: ignore[no-untyped-call]
    return out


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: ExchangeTable, transport: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.table, ctx.transport = table, transport
        return _exchange(tensors, transport, table.axis, 2, table.heads, 1, table.lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        table = ctx.table
        return None, None, *_exchange(grads, ctx.transport, table.axis, 1, table.lengths, 2, table.heads)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: ExchangeTable, transport: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.table, ctx.transport = table, transport
        return _exchange(tensors, transport, table.axis, 1, table.lengths, 2, table.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        table = ctx.table
        return None, None, *_exchange(grads, ctx.transport, table.axis, 2, table.heads, 1, table.lengths)


def _exchange(
    tensors: tuple[Tensor, ...],
    transport: Transport,
    axis: Axis,
    scatter_dim: int,
    scatter_sizes: tuple[int, ...],
    gather_dim: int,
    gather_sizes: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Scatters ``scatter_dim`` and gathers ``gather_dim``; starts every message before it waits for the first."""
    pending = []
    for x in tensors:
        # The piece for rank p is x's share p of scatter_dim; the piece from rank p has that rank's share of gather_dim.
        received_shapes = []
        for size in gather_sizes:
            shape = list(x.shape)
            shape[scatter_dim], shape[gather_dim] = scatter_sizes[axis.rank], size
            received_shapes.append(shape)
        message, send = _pack(x, scatter_dim, scatter_sizes)
        receive = [prod(shape) for shape in received_shapes]
        pending.append((transport.all_to_all(message, send, receive, axis), receive, received_shapes))
    return tuple(_unpack(transport.wait(message), receive, shapes, gather_dim) for message, receive, shapes in pending)


def _unpack(message: Tensor, receive: list[int], shapes: list[list[int]], dim: int) -> Tensor:
    """Joins the received pieces along ``dim``."""
    if prod(shapes[0][:dim]) == 1:  # they already lie one behind the other (B = 1): nothing to copy
        joined = shapes[0].copy()
        joined[dim] = sum(shape[dim] for shape in shapes)
        return message.view(joined)
    return torch.cat([piece.view(shape) for piece, shape in zip(message.split(receive), shapes, strict=True)], dim)


def _pack(x: Tensor, dim: int, sizes: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Writes x's shares along ``dim`` one behind the other, in one pass over x."""
    pieces = x.split(sizes, dim)
    send = [piece.numel() for piece in pieces]
    message = x.new_empty(x.numel())
    for target, piece in zip(message.split(send), pieces, strict=True):
        target.view(piece.shape).copy_(piece)
    return message, send
