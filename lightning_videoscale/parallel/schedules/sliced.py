"""Messages that are slices of matrix products, each on its way while the next slice is computed. Forward and backward.

The weight's rows that make one rank's heads are one matrix product, whose output is that rank's message: nothing is
packed. Query, key and value travel one after the other, behind each other's products. In backward the gradients of
heads lie as they are sent; that of the value goes first, as the norms of query and key need a sum over ranks, and each
weight's gradient is computed while what follows it travels. A rank's own slice is computed last.

Shapes: B batch, s tokens of this rank, S tokens of all ranks of the Ulysses group, C channels of the input, H heads, h
heads of this rank, D head dim. Where a Linear is more than its weight and bias (LoRA, hooks), what it returns is sent
in its place: which messages there are, in which order, does not depend on what a rank has in a Linear's place.

Rounding is that of serial code: no sum is split that is not split there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels.autograd import in_dtypes_of_forward, under_autocast
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.transport import Exchange
from lightning_videoscale.parallel.ulysses import Ulysses, times, unpack

Linear = tuple[Tensor, Tensor | None]
"""Weight (H · D, C) or, of the output projection, (C, H · D), and bias."""


@dataclass(frozen=True)
class Heads:
    """What attention takes.

    Attributes:
        query: (B, h, S, D), with tokens before heads in memory.
        key: Likewise.
        value: Likewise.
        before_norm: Query and key before the norm, (1, S · B, h, D) each, and their statistics.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    before_norm: tuple[Tensor, Tensor, Tensor]


def project_heads(
    x: Tensor,
    projections: Sequence[Linear | Tensor],
    norm: NormAcrossHeads,
    tensors: NormTensors,
    ulysses: Ulysses,
    heads: int,
) -> Heads:
    """Projects to query, key and value, gathers the sequence and scatters the heads, normalises and rotates.

    Args:
        x: (B, s, C), this rank's tokens.
        projections: Of query, key and value: a Linear, or what one returned for x, (B, s, H · D).
        norm: Of query and key, over all heads.
        tensors: The norm's weights for this rank's heads, and the tables of all tokens, (1, S · B, 1, P).
        ulysses: The group, of two ranks or more; with as many key/value heads as query heads.
        heads: H.

    Returns:
        Query, key and value; differentiable once.
    """
    given = [p if isinstance(p, Tensor) else None for p in projections]
    linears = [(None, None) if isinstance(p, Tensor) else p for p in projections]
    parameters = [t for weight_and_bias in linears for t in weight_and_bias]
    x, *parameters = _as_computed(x, parameters)
    with torch.autocast(x.device.type, enabled=False):
        query, key, value, *before_norm = _ProjectHeads.apply(  # type: ignore[no-untyped-call]
            _Call(ulysses, norm, heads), x, *parameters, *given, *tensors.weights, *tensors.tables
        )
    return Heads(query, key, value, tuple(before_norm))  # type: ignore[arg-type]


def normed_again(
    before_norm: tuple[Tensor, Tensor, Tensor], batch: int, norm: NormAcrossHeads, tensors: NormTensors
) -> tuple[Tensor, Tensor]:
    """Returns query and key once more, to the bit, of what `Heads` has from before the norm; see `recomputed`."""
    query, key = norm.forward(*before_norm, tensors)
    return _heads_first(query, batch), _heads_first(key, batch)


def project_output(out: Tensor, linear: Linear, ulysses: Ulysses) -> Tensor:
    """Scatters the sequence, gathers the heads and projects them.

    Args:
        out: (B, h, S, D), what attention returned.
        linear: The output projection.
        ulysses: The group.

    Returns:
        (B, s, C); differentiable once.
    """
    out, *parameters = _as_computed(out, linear)
    with torch.autocast(out.device.type, enabled=False):
        projected: Tensor = _ProjectOutput.apply(ulysses, out, *parameters)  # type: ignore[no-untyped-call]
    return projected


@dataclass(frozen=True)
class _Call:
    """What a layer's exchanges need to know."""

    ulysses: Ulysses
    norm: NormAcrossHeads
    heads: int


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        parameters, given, of_norm = tensors[:6], tensors[6:9], tensors[9:]
        norm_tensors = NormTensors(of_norm[:2], of_norm[2:])  # type: ignore[arg-type]
        batch = x.shape[0]
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        sources = [
            _Source(rows, parameters[2 * i], parameters[2 * i + 1], given[i], call.heads) for i in range(3)
        ]
        query, key = (_sent(source, batch, call.ulysses) for source in sources[:2])
        sums = sum(call.norm.square_sums(*pair) for pair in zip(query.pieces, key.pieces, strict=True))
        statistics = _sent_to_all(sums, call.ulysses, batch)  # type: ignore[arg-type]
        value = _sent(sources[2], batch, call.ulysses)
        raw = [_rows_of_heads(each.exchange.finish(), batch, call.ulysses) for each in (query, key)]
        rstds = call.norm.rstds(statistics.finish().view(-1, 2))
        normed = call.norm.forward(*raw, rstds, norm_tensors)
        values = _rows_of_heads(value.exchange.finish(), batch, call.ulysses)
        ctx.call = call
        ctx.save_for_backward(x, *parameters[0::2], *raw, rstds, *of_norm)
        ctx.mark_non_differentiable(*raw, rstds)
        return *(_heads_first(each, batch) for each in (*normed, values)), *raw, rstds

    @staticmethod
    @torch.autograd.function.once_differentiable
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors[:4]
        query, key, rstds, *of_norm = ctx.saved_tensors[4:]
        call, tensors, batch = ctx.call, NormTensors(tuple(of_norm[:2]), tuple(of_norm[2:])), x.shape[0]
        dq, dk, dv = (_tokens_first(g) for g in gradients[:3])
        returning = {2: _returned(dv, call.ulysses, batch)}
        mine = call.norm.gradient_sums((dq, dk), (query, key), rstds, tensors)
        sums = _summed(mine, call.ulysses)
        dq, dk, *of_weights = call.norm.backward((dq, dk), (query, key), rstds, sums, tensors)
        returning |= {1: _returned(dk, call.ulysses, batch), 0: _returned(dq, call.ulysses, batch)}
        needs = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[2])
        at_home: dict[int, Tensor] = {}
        of_parameters: list[Tensor | None] = [None] * 6
        for i, message in returning.items():
            at_home[i] = dy = _unpacked(message(), call.ulysses, batch, query.shape[3]).flatten(0, 1)
            of_parameters[2 * i] = dy.t() @ rows if needs[2 + 2 * i] else None
            of_parameters[2 * i + 1] = dy.sum(0) if needs[3 + 2 * i] else None
        plain = [(at_home[i], weight) for i, weight in enumerate(weights) if weight is not None]
        dx = _sum_of_products(plain).view_as(x) if plain and needs[1] else None
        of_given = [at_home[i].view(*x.shape[:2], -1) if needs[8 + i] else None for i in range(3)]
        of_weights = [g if needed else None for g, needed in zip(of_weights, needs[11:13], strict=True)]
        return None, dx, *of_parameters, *of_given, *of_weights, None, None


class _ProjectOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batch = out.shape[0]
        gathered = _unpacked(_returned(_tokens_first(out), ulysses, batch)(), ulysses, batch, out.shape[3])
        ctx.ulysses, ctx.head_dim = ulysses, out.shape[3]
        ctx.save_for_backward(gathered, weight)
        return F.linear(gathered, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @in_dtypes_of_forward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        batch, heads = dy.shape[0], weight.shape[1] // ctx.head_dim
        rows = dy.transpose(0, 1).reshape(-1, dy.shape[2])
        sent = _sent(_Source(rows, weight.t(), None, None, heads), batch, ctx.ulysses)
        needs, flat = ctx.needs_input_grad, dy.reshape(-1, dy.shape[2])
        of_weight = flat.t() @ gathered.flatten(0, 1) if needs[2] else None  # while the message travels
        of_bias = flat.sum(0) if needs[3] else None
        received = _rows_of_heads(sent.exchange.finish(), batch, ctx.ulysses)
        return None, _heads_first(received, batch), of_weight, of_bias


@dataclass(frozen=True)
class _Source:
    """What makes the heads of this rank's tokens: rows (s · B, C) and weight (H · D, C), or a result (B, s, H · D)."""

    rows: Tensor
    weight: Tensor | None
    bias: Tensor | None
    result: Tensor | None
    heads: int

    @property
    def head_dim(self) -> int:
        width = self.weight.shape[0] if self.weight is not None else self.result.shape[2]  # type: ignore[union-attr]
        return width // self.heads

    def write(self, heads: range, target: Tensor) -> None:
        """Writes the channels of some heads into (s · B, h · D)."""
        channels = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        if self.weight is None:
            assert self.result is not None
            part = self.result[..., channels].transpose(0, 1)
            target.view(part.shape).copy_(part)
        elif self.bias is None:
            torch.mm(self.rows, self.weight[channels].t(), out=target)
        else:
            torch.addmm(self.bias[channels], self.rows, self.weight[channels].t(), out=target)


@dataclass(frozen=True)
class _Sent:
    """Heads on their way, and the pieces as they were sent, (1, s · B, h', D) of each rank's h' heads."""

    exchange: Exchange
    pieces: list[Tensor]


def _sent(source: _Source, batch: int, ulysses: Ulysses) -> _Sent:
    """Computes the heads of each rank and sends them, the own ones last."""
    shares, axis, dim = ulysses.heads.out, ulysses.axis, source.head_dim
    like = source.rows if source.result is None else source.result
    sizes = times(shares.by_heads, batch * dim), times(shares.by_tokens, batch * dim)
    exchange = ulysses.transport.open(*sizes, like, axis)
    for step in range(1, axis.size + 1):  # every rank begins with another, so that no link is shared
        peer = (axis.rank + step) % axis.size
        heads = shares.heads[0][peer]
        source.write(heads, exchange.room(peer).view(-1, len(heads) * dim))
        exchange.send(peer)
    pieces = [exchange.room(peer).view(1, -1, shares.counts[peer][0], dim) for peer in range(axis.size)]
    return _Sent(exchange, pieces)


def _sent_to_all(sums: Tensor, ulysses: Ulysses, batch: int) -> Exchange:
    """Sends (s · B, n) numbers of this rank's tokens to every rank."""
    shares, each = ulysses.heads.out, sums.shape[1] * batch
    tokens = [size // shares.mine[0] for size in shares.by_tokens]
    exchange = ulysses.transport.open([sums.numel()] * len(tokens), [n * each for n in tokens], sums, ulysses.axis)
    for peer in range(ulysses.axis.size):
        exchange.room(peer).copy_(sums.flatten())
    exchange.send(*range(ulysses.axis.size))
    return exchange


def _summed(x: Tensor, ulysses: Ulysses) -> Tensor:
    """The sum over all ranks, of tensors of one shape; in one order on all of them."""
    size = ulysses.axis.size
    message = x.flatten().repeat(size)
    received = ulysses.transport.exchange(message, [x.numel()] * size, [x.numel()] * size, ulysses.axis)
    return received.view(size, *x.shape).sum(0)


def _returned(rows: Tensor, ulysses: Ulysses, batch: int) -> Any:
    """Sends every rank the rows of its tokens; calling what this returns waits for the message."""
    shares, dim = ulysses.heads.out, rows.shape[3]
    sizes = times(shares.by_tokens, batch * dim), times(shares.by_heads, batch * dim)
    pending = ulysses.transport.all_to_all(rows.flatten(), *sizes, ulysses.axis)
    return lambda: ulysses.transport.wait(pending)


def _unpacked(message: Tensor, ulysses: Ulysses, batch: int, dim: int) -> Tensor:
    """(B, s, H · D) of the message that `_returned` waits for."""
    return unpack(message, batch, dim, ulysses.heads.out)[0].flatten(2)


def _rows_of_heads(message: Tensor, batch: int, ulysses: Ulysses) -> Tensor:
    """A received message as rows, (1, S · B, h, D)."""
    mine = ulysses.heads.out.mine[0]
    return message.view(1, sum(ulysses.heads.out.by_tokens) // mine * batch, mine, -1)


def _heads_first(rows: Tensor, batch: int) -> Tensor:
    """(B, h, S, D) of (1, S · B, h, D)."""
    _, count, heads, dim = rows.shape
    return rows.view(count // batch, batch, heads, dim).permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    """The inverse of `_heads_first`; copies where tokens do not come first in memory."""
    return x.permute(2, 0, 1, 3).contiguous().flatten(0, 1)[None]


def _sum_of_products(factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of matrix products, each added as it is computed."""
    (first, weight), *others = factors
    total = first @ weight
    for dy, weight in others:
        total.addmm_(dy, weight)
    return total


def _as_computed(x: Tensor, parameters: Sequence[Tensor | None]) -> list[Any]:
    """The tensors in the dtype that they are multiplied in."""
    if not under_autocast(x):
        return [x, *parameters]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if t is None else t.to(dtype) for t in (x, *parameters)]
