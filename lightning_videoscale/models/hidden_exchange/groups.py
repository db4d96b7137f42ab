"""The streams of an attention, by the layers that project them: `StreamGroup`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.parallel import Projection, SequenceContext, split_sizes
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads

Streams = Mapping[str, Projection]
"""Of an attention, in the order in which it joins them."""


class StreamGroup(NamedTuple):
    """Streams with the same projections, in the attention's order, which one message carries together."""

    streams: tuple[str, ...]
    projection: Projection

    def tokens(self, described: Streams, arguments: Mapping[str, Any]) -> Tensor:
        """(B, s, C), this rank's tokens of the streams, one stream behind the other."""
        if self.projection.tokens_of:
            joined: Tensor = arguments[self.projection.tokens]
            return joined
        parts = [arguments[described[stream].tokens] for stream in self.streams]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def groups_of(described: Streams) -> list[StreamGroup]:
    """The groups of an attention's streams."""
    found: dict[tuple[str | None, ...], list[str]] = {}
    for stream, projection in described.items():
        found.setdefault(projection.linears, []).append(stream)
    return [StreamGroup(tuple(streams), described[streams[0]]) for streams in found.values()]


class HeadPlacement(NamedTuple):
    """Where an attention's heads and tokens are."""

    context: SequenceContext
    heads: int

    def lengths(self, streams: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens that each rank of the Ulysses group has of the streams together."""
        mesh = self.context.mesh
        start = mesh.ring.rank * mesh.ulysses.size
        return self.context.lengths(streams)[start : start + mesh.ulysses.size]

    def tokens(self, streams: tuple[str, ...]) -> int:
        """Tokens of the Ulysses group."""
        return sum(self.lengths(streams))

    def ulysses(self, streams: tuple[str, ...]) -> Ulysses:
        """The exchange of the streams' heads."""
        axis, lengths = self.context.mesh.ulysses, self.lengths(streams)
        assigned = assign_heads(axis.rank, lengths, lengths, self.heads, self.heads)
        return Ulysses(axis, assigned, self.context.transport, self.context.number)

    @property
    def mine(self) -> range:
        """The heads of this rank."""
        axis = self.context.mesh.ulysses
        sizes = split_sizes(self.heads, axis.size)
        start = sum(sizes[: axis.rank])
        return range(start, start + sizes[axis.rank])

    def by_stream(self, x: Tensor, streams: tuple[str, ...]) -> Tensor:
        """Of (B, S, ...) with all streams of a rank before those of the next, all ranks of a stream before the next."""
        if len(streams) == 1:
            return x
        by_rank = zip(*(self.lengths((stream,)) for stream in streams), strict=True)
        pieces = x.split([length for of_rank in by_rank for length in of_rank], 1)
        return torch.cat([piece for i in range(len(streams)) for piece in pieces[i :: len(streams)]], 1)

    def by_rank(self, parts: list[Tensor], streams: tuple[str, ...]) -> Tensor:
        """The inverse of `by_stream`, of each stream's tokens."""
        if len(parts) == 1:
            return parts[0]
        pieces = [part.split(self.lengths((stream,)), 1) for part, stream in zip(parts, streams, strict=True)]
        return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank], 1)
