"""Heads of tokens as they are sent, and as they arrive.

Shapes: B batch, s tokens of this rank, S tokens of all ranks of the Ulysses group, H heads, h heads of this rank, D
head dim. Rows are (tokens · B, heads, D), tokens first: those that a rank receives from all others are, one behind the
other, the whole sequence, and those of one rank's tokens are what it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels.autograd import under_autocast
from lightning_videoscale.parallel.transport import ColumnExchange, Exchange, beside_each_other
from lightning_videoscale.parallel.ulysses import Ulysses, times
from lightning_videoscale.parallel.words import copy_by_words

Linear = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias."""

SECOND_DERIVATIVE = (
    "A layer whose schedule hides the exchange has no second derivative, as a penalty on gradients of inputs needs it. "
    "Take schedule='serial'."
)


@dataclass(frozen=True)
class HeadSource:
    """What makes the heads of this rank's tokens: a matrix product, or what another one returned.

    Attributes:
        rows: (s · B, C), tokens first.
        weight: (H · D, C); None where ``result`` has the heads.
        bias: (H · D,) or None.
        result: (B, s, H · D) or None.
        heads: H.
    """

    rows: Tensor
    weight: Tensor | None
    bias: Tensor | None
    result: Tensor | None
    heads: int

    @property
    def head_dim(self) -> int:
        """D."""
        width = self.weight.shape[0] if self.result is None else self.result.shape[2]  # type: ignore[union-attr]
        return width // self.heads

    def computed(self, batch: int) -> HeadSource:
        """Returns the same heads as a result, by one matrix product if they are not one yet."""
        if self.weight is None:
            return self
        result = F.linear(self.rows, self.weight, self.bias).view(-1, batch, self.weight.shape[0])
        return HeadSource(self.rows, None, None, result.transpose(0, 1), self.heads)

    def write(self, heads: range, target: Tensor) -> None:
        """Writes the channels of some heads into (s · B, h · D)."""
        channels = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        if self.result is not None:
            part = self.result[..., channels].transpose(0, 1)
            copy_by_words(target.view(part.shape), part)
            return
        assert self.weight is not None
        columns = self.weight[channels].t()
        if self.bias is None:
            torch.mm(self.rows, columns, out=target)
        else:
            torch.addmm(self.bias[channels], self.rows, columns, out=target)


@dataclass(frozen=True)
class Sent:
    """Heads on their way, and what was sent to each rank: rows (s · B, h', D) of its h' heads."""

    exchange: Exchange
    pieces: Sequence[Tensor]

    def received(self, ulysses: Ulysses, batch: int) -> Tensor:
        """Waits for this rank's heads of all tokens; rows (S · B, h, D)."""
        mine = ulysses.heads.out.mine[0]
        return ulysses.transport.wait(self.exchange).view(sum(ulysses.heads.out.by_tokens) // mine * batch, mine, -1)


def scatter_heads_of(source: HeadSource, batch: int, ulysses: Ulysses, *, by_slices: bool) -> Sent:
    """Computes the heads of each rank, or without ``by_slices`` of all, and sends them, this rank's own last."""
    source = source if by_slices else source.computed(batch)
    shares, axis, dim = ulysses.heads.out, ulysses.axis, source.head_dim
    send, receive = times(shares.by_heads, batch * dim), times(shares.by_tokens, batch * dim)
    exchange = ulysses.transport.begin(source.rows if source.result is None else source.result, send, receive, axis)
    for peer in peers_of(ulysses):
        source.write(shares.heads[0][peer], exchange.pieces[peer].view(source.rows.shape[0], -1))
        exchange.send(peer)
    return Sent(exchange, [piece.view(source.rows.shape[0], -1, dim) for piece in exchange.pieces])


def return_tokens(rows: Tensor, ulysses: Ulysses, batch: int) -> Callable[[], Tensor]:
    """Starts to send every rank the rows (S · B, h, D) of its tokens.

    Returns:
        What waits for those that come here: (B, s, H · D).
    """
    shares, dim = ulysses.heads.out, rows.shape[2]
    sizes = times(shares.by_tokens, batch * dim), times(shares.by_heads, batch * dim)
    message = rows.flatten()
    pending = ulysses.transport.all_to_all(message, *sizes, ulysses.axis)
    return lambda: joined_heads(pending, ulysses, batch)


def return_columns(rows: Tensor, ulysses: Ulysses, batch: int) -> ColumnExchange:
    """Starts to send every rank the rows (S · B, h, D) of its tokens, which there are columns of (B, s, H · D)."""
    columns, lengths, widths = _as_columns(rows, ulysses, batch)
    return ulysses.transport.begin_columns(columns, lengths, widths, ulysses.axis)


class OwnColumns(NamedTuple):
    """What this rank has of the columns of its own tokens.

    Attributes:
        columns: (B · s, h · D).
        place: Where they are among all columns.
        width: H · D.
    """

    columns: Tensor
    place: slice
    width: int


def own_columns(rows: Tensor, ulysses: Ulysses, batch: int) -> OwnColumns:
    """Finds among rows (S · B, h, D) those of this rank's tokens, as `return_columns` puts them."""
    columns, lengths, widths = _as_columns(rows, ulysses, batch)
    rank = ulysses.axis.rank
    first = sum(widths[:rank])
    own = columns.split(lengths)[rank].transpose(0, 1).flatten(0, 1)
    return OwnColumns(own, slice(first, first + widths[rank]), sum(widths))


def _as_columns(rows: Tensor, ulysses: Ulysses, batch: int) -> tuple[Tensor, list[int], list[int]]:
    """(S, B, h · D) of rows (S · B, h, D), the tokens of each rank, and the columns of each."""
    shares, dim = ulysses.heads.out, rows.shape[2]
    mine = shares.mine[0]
    lengths = [size // mine for size in shares.by_tokens]
    return rows.view(-1, batch, mine * dim), lengths, [count * dim for (count,) in shares.counts]


def joined_heads(pending: Any, ulysses: Ulysses, batch: int) -> Tensor:
    """Waits for an exchange that brings this rank's tokens, from every rank its heads; (B, s, H · D)."""
    return ulysses.transport.wait(pending, partial(beside_each_other, ulysses.heads.out.tokens, batch))


def send_to_all(numbers: Tensor, ulysses: Ulysses, batch: int) -> Exchange:
    """Sends (s · B, n) numbers of this rank's tokens to every rank."""
    shares, each = ulysses.heads.out, numbers.shape[1] * batch
    receive = [size // shares.mine[0] * each for size in shares.by_tokens]
    size = ulysses.axis.size
    message = numbers.flatten().repeat(size)
    exchange = ulysses.transport.open(message, [numbers.numel()] * size, receive, ulysses.axis)
    exchange.send(*peers_of(ulysses))
    return exchange


def sum_over_ranks(x: Tensor, ulysses: Ulysses) -> Callable[[], Tensor]:
    """Starts to add the ranks' tensors, of one shape, in one order on all ranks; returns what waits for the sum."""
    sizes = [x.numel()] * ulysses.axis.size
    pending = ulysses.transport.all_to_all(x.flatten().repeat(len(sizes)), sizes, sizes, ulysses.axis)

    def total() -> Tensor:
        return ulysses.transport.wait(pending).view(len(sizes), *x.shape).sum(0)

    return total


def peers_of(ulysses: Ulysses) -> list[int]:
    """Positions on the axis, this rank's last; every rank begins with another, so that no link is shared."""
    axis = ulysses.axis
    return [(axis.rank + step) % axis.size for step in range(1, axis.size + 1)]


def heads_first(rows: Tensor, batch: int) -> Tensor:
    """(B, h, S, D) of rows (S · B, h, D)."""
    tokens = rows.shape[0] // batch
    return rows.view(tokens, batch, *rows.shape[1:]).permute(1, 2, 0, 3)


def rows_of(x: Tensor) -> Tensor:
    """The inverse of `heads_first`; copies where tokens do not come first in memory."""
    return x.permute(2, 0, 1, 3).contiguous().flatten(0, 1)


def as_computed(x: Tensor, others: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors in the dtype that autocast multiplies them in."""
    if not under_autocast(x):
        return [x, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if t is None else t.to(dtype) for t in (x, *others)]
