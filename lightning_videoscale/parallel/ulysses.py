"""Ulysses: trade sequence slices for heads, and back (Jacobs et al., DeepSpeed Ulysses, 2023).

Shapes: B batch, s tokens of this rank, S tokens of all ranks, H heads, h heads of this rank, D head dim.

`scatter_heads`  (B, s, H, D) of query, key and value -> (B, h, S, D) of each                    before attention
`gather_heads`   (B, h, S, D) -> (B, s, H, D)                                                   after it

For query heads each is the other's inverse and therefore its gradient. Lengths and heads need not divide by the number
of ranks. Query, key and value are one message where they are of one sequence, and two where not. Key/value heads may be
fewer than query heads and than ranks: each goes to every rank that has one of its query heads, and the gradients that
come back from there are added up (in fp32, of parts rounded to the gradient's dtype: at most one rounding per part more
than on one rank).

The piece of a message that rank s sends to rank r before attention, and r to s after it, is (tokens of s, B, heads of r
of all tensors, D). Tokens come first, so that the pieces that a rank receives before attention are, one behind the
other, the whole sequence: the tensors that go into attention are views of the message, and the other way round after
it. Only the side that holds all heads copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.parallel.exchange_op import exchange
from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.sharding import split_sizes
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.parallel.words import by_words


@dataclass(frozen=True)
class HeadShares:
    """Which tokens the ranks hold before an exchange of some tensors, and which heads after.

    Attributes:
        tokens: Tokens of this rank.
        heads: ``heads[t][r]`` are those heads of tensor t that rank r has after the exchange; those of neighbours
            overlap where a key/value head serves both.
        counts: ``counts[r][t]`` is the number of them.
        mine: ``counts[r]`` of this rank.
        by_heads: Numbers of each rank that this one sends before attention and receives after it, over B · D.
        by_tokens: Numbers of each rank that this one receives before attention and sends after it, over B · D.
        even: Whether all tensors have the same number of heads, and give the same number of them to every rank.
    """

    tokens: int
    heads: tuple[tuple[range, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    mine: tuple[int, ...]
    by_heads: tuple[int, ...]
    by_tokens: tuple[int, ...]
    even: bool

    @classmethod
    def create(cls, rank: int, lengths: tuple[int, ...], heads: tuple[tuple[range, ...], ...]) -> HeadShares:
        """Returns what one rank exchanges, given the tokens of all ranks and their heads of each tensor."""
        counts = tuple(tuple(map(len, shares)) for shares in zip(*heads, strict=True))
        disjoint = all(sum(map(len, shares)) == shares[-1].stop for shares in heads)
        return cls(
            lengths[rank],
            heads,
            counts,
            counts[rank],
            tuple(lengths[rank] * sum(of_rank) for of_rank in counts),
            tuple(length * sum(counts[rank]) for length in lengths),
            disjoint and len({count for of_rank in counts for count in of_rank}) == 1,
        )


@dataclass(frozen=True)
class HeadAssignment:
    """Which heads the ranks of a Ulysses group have in a layer, as one of them needs to know.

    Attributes:
        qkv: The exchange of query, key and value in one message; None where keys are of another sequence.
        out: The exchange of the output, and of such a query.
        kv: The exchange of such keys and values.
        repeats: How many of this rank's query heads each of this rank's key/value heads serves, in their order.
    """

    qkv: HeadShares | None
    out: HeadShares
    kv: HeadShares
    repeats: tuple[int, ...]

    @classmethod
    def create(
        cls, rank: int, lengths: tuple[int, ...], key_lengths: tuple[int, ...], heads: int, kv_heads: int
    ) -> HeadAssignment:
        """Shares the heads out; see `assign_heads`."""
        check_heads(heads, len(lengths))
        group = heads // kv_heads
        sizes = split_sizes(heads, len(lengths))
        query = tuple(range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))
        kv = tuple(range(share.start // group, (share.stop - 1) // group + 1) for share in query)
        serving = [head // group for head in query[rank]]
        return cls(
            HeadShares.create(rank, lengths, (query, kv, kv)) if lengths == key_lengths else None,
            HeadShares.create(rank, lengths, (query,)),
            HeadShares.create(rank, key_lengths, (kv, kv)),
            tuple(serving.count(head) for head in kv[rank]),
        )


_known_assignment = lru_cache(maxsize=256)(HeadAssignment.create)


def assign_heads(
    rank: int, lengths: tuple[int, ...], key_lengths: tuple[int, ...], heads: int, kv_heads: int
) -> HeadAssignment:
    """Shares the heads out over the ranks of a Ulysses group.

    Args:
        rank: Position of the rank that is to know.
        lengths: Queries of each rank.
        key_lengths: Keys of each rank.
        heads: Query heads.
        kv_heads: Key/value heads; ``heads`` is a multiple of them.

    Raises:
        ValueError: If there are fewer query heads than ranks.
    """
    # `torch.compile` evaluates it once, and warns of caches.
    create = HeadAssignment.create if torch.compiler.is_compiling() else _known_assignment
    return create(rank, lengths, key_lengths, heads, kv_heads)


def check_heads(heads: int, ulysses_size: int) -> None:
    """Raises a ``ValueError`` with the way out if some rank would have no head."""
    if heads < ulysses_size:
        raise ValueError(
            f"Attention with {heads} heads cannot be spread over ulysses_size={ulysses_size} ranks: every rank needs "
            f"at least one head. Use ulysses_size <= {heads}, and ring_size for more ranks."
        )


@dataclass(frozen=True)
class Ulysses:
    """A Ulysses group in a layer, as one of its ranks sees it.

    Attributes:
        axis: The ranks.
        heads: Which heads they have.
        transport: What sends messages.
        number: Of the group, by which ops of compiled code find it; None where only eager code runs.
    """

    axis: Axis
    heads: HeadAssignment
    transport: Transport
    number: int | None = None

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """As `Transport.exchange`, along the axis."""
        return exchange(message, send, receive, self.axis, self.transport, self.number)


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, ulysses: Ulysses) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers the sequence and scatters the heads.

    Args:
        query: (B, s, H, D).
        key: (B, t, H', D).
        value: As ``key``.
        ulysses: The group, of two ranks or more.

    Returns:
        (B, h, S, D) of each, with tokens before heads in memory; (B, h', T, D) of key and value.
    """
    heads = ulysses.heads
    tensors: tuple[Tensor, Tensor, Tensor]
    if heads.qkv is not None:
        tensors = _ScatterHeads.apply(heads.qkv, ulysses, query, key, value)  # type: ignore[no-untyped-call]
    else:
        queries: tuple[Tensor] = _ScatterHeads.apply(heads.out, ulysses, query)  # type: ignore[no-untyped-call]
        tensors = *queries, *_ScatterHeads.apply(heads.kv, ulysses, key, value)  # type: ignore[no-untyped-call]
    return tensors


def gather_heads(out: Tensor, ulysses: Ulysses) -> Tensor:
    """Scatters the sequence and gathers the heads: the inverse of `scatter_heads` for query heads.

    Args:
        out: (B, h, S, D); nothing is copied here if tokens come before heads in memory.
        ulysses: The group, of two ranks or more.

    Returns:
        (B, s, H, D), contiguous.
    """
    gathered: Tensor = _GatherHeads.apply(ulysses.heads.out, ulysses, out)[0]  # type: ignore[no-untyped-call]
    return gathered


def repeat_heads(x: Tensor, repeats: tuple[int, ...]) -> Tensor:
    """Repeats head i of (B, h, S, D) ``repeats[i]`` times, so that every query head finds its key/value head."""
    if set(repeats) == {1}:
        return x
    heads = zip(x.split(1, 1), repeats, strict=True)
    return torch.cat([head.expand(-1, times, -1, -1) for head, times in heads], 1)


def sum_heads(grad: Tensor, repeats: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The gradient of `repeat_heads`, added up in ``dtype``."""
    if set(repeats) == {1}:
        return grad
    return torch.stack([copies.sum(1, dtype=dtype) for copies in grad.split(repeats, 1)], 1)


# Their inputs are not named: without gradients `torch.compile` drops ``ctx`` where there is one argument more than
# parameters.


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        shares, ulysses, *tensors = inputs
        ctx.shares, ctx.ulysses, ctx.returns = shares, ulysses, "slice"
        return _scatter(tensors, shares, ulysses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():  # nobody differentiates this again
            return None, None, *_gather(grads, ctx.shares, ctx.ulysses)
        return None, None, *_GatherHeads.apply(ctx.shares, ctx.ulysses, *grads)  # type: ignore[no-untyped-call]


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        shares, ulysses, *tensors = inputs
        ctx.shares, ctx.ulysses, ctx.returns = shares, ulysses, "slice"
        return _gather(tensors, shares, ulysses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return None, None, *_scatter(grads, ctx.shares, ctx.ulysses)
        return None, None, *_ScatterHeads.apply(ctx.shares, ctx.ulysses, *grads)  # type: ignore[no-untyped-call]


def _scatter(tensors: Sequence[Tensor], shares: HeadShares, ulysses: Ulysses) -> tuple[Tensor, ...]:
    batch, _, _, dim = tensors[0].shape
    send, receive = times(shares.by_heads, batch * dim), times(shares.by_tokens, batch * dim)
    received = ulysses.exchange(pack(tensors, shares), send, receive)
    heads_first = received.view(-1, batch, sum(shares.mine), dim).permute(1, 2, 0, 3)
    return tuple(heads_first.split_with_sizes(shares.mine, 1))


def _gather(tensors: Sequence[Tensor], shares: HeadShares, ulysses: Ulysses) -> tuple[Tensor, ...]:
    batch, _, _, dim = tensors[0].shape
    tokens_first = [x.permute(2, 0, 1, 3) for x in tensors]
    message = by_words(partial(torch.cat, dim=2), tokens_first) if len(tensors) > 1 else tokens_first[0].contiguous()
    send, receive = times(shares.by_tokens, batch * dim), times(shares.by_heads, batch * dim)
    received = ulysses.exchange(message.flatten(), send, receive)
    return unpack(received, batch, dim, shares)


def pack(tensors: Sequence[Tensor], shares: HeadShares) -> Tensor:
    """Writes for each rank, one behind the other, its heads of all tensors (B, s, H, D), reading each once."""
    return by_words(partial(_pack_evenly if shares.even else _pack, shares), list(tensors))


def _pack_evenly(shares: HeadShares, tensors: Sequence[Tensor]) -> Tensor:
    # Of four dims, torch copies all tensors by one kernel; of more, each by its own.
    batch, tokens, _, dim = tensors[0].shape
    ranks, heads = len(shares.counts), shares.mine[0]
    if batch == 1:
        pieces = [x.view(tokens, ranks, heads, dim).transpose(0, 1) for x in tensors]
        return torch.cat(pieces, 2).flatten()
    pieces = [x.flatten(2).view(batch, tokens, ranks, heads * dim).permute(2, 1, 0, 3) for x in tensors]
    return torch.cat(pieces, 3).flatten()


def _pack(shares: HeadShares, tensors: Sequence[Tensor]) -> Tensor:
    batch, tokens, _, dim = tensors[0].shape
    sizes = times(shares.by_heads, batch * dim)
    message = tensors[0].new_empty(sum(sizes))
    for rank, piece in enumerate(message.split(sizes)):
        targets = piece.view(tokens, batch, -1, dim).split(shares.counts[rank], 2)
        for x, heads, target in zip(tensors, shares.heads, targets, strict=True):
            target.copy_(x.narrow(2, heads[rank].start, len(heads[rank])).transpose(0, 1))
    return message


def unpack(message: Tensor, batch: int, dim: int, shares: HeadShares) -> tuple[Tensor, ...]:
    """The inverse of `pack`; where heads of ranks overlap, they are added up."""
    if shares.even:
        ranks, heads = len(shares.counts), shares.mine[0]
        pieces = by_words(_tokens_before_ranks, [message.view(ranks, shares.tokens, batch, -1, heads * dim)])
        return pieces.view(-1, batch, shares.tokens, ranks * heads, dim).unbind()
    split = [
        piece.view(shares.tokens, batch, -1, dim).transpose(0, 1).split(counts, 2)
        for piece, counts in zip(message.split(times(shares.by_heads, batch * dim)), shares.counts, strict=True)
    ]
    return tuple(_join(parts, heads) for parts, heads in zip(zip(*split, strict=True), shares.heads, strict=True))


def _tokens_before_ranks(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0].permute(3, 2, 1, 0, 4).contiguous()


def _join(parts: Sequence[Tensor], shares: Sequence[range]) -> Tensor:
    """Puts the ranks' heads (B, s, h, D) in their places."""
    heads = shares[-1].stop
    if sum(map(len, shares)) == heads:
        return torch.cat(list(parts), 2)
    batch, tokens, _, dim = parts[0].shape
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].new_zeros(batch, tokens, heads, dim, dtype=wide)
    for part, share in zip(parts, shares, strict=True):
        total.narrow(2, share.start, len(share)).add_(part)
    return total.to(parts[0].dtype)


def times(numbers: tuple[int, ...], factor: int) -> list[int]:
    """Returns the sizes of pieces, given those over B · D."""
    return [number * factor for number in numbers]
