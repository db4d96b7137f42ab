"""Layers whose exchanges are exact: every number equals that of the same layers over the whole sequence, to the bit.

What stands for attention chooses among what was exchanged, and all numbers are whole and small, so no sum rounds. A
number that was read too early or too late is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.parallel import Axis, Transport
from lightning_videoscale.parallel.schedules.messages import return_columns, rows_of
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads, gather_heads, pack, scatter_heads, times

HEADS, DIM, TOKENS = 5, 8, 2
"""TOKENS is the dim of tokens in all that is drawn and returned."""


CALLS = 16
"""Of the transport for a layer: eight exchanges are begun and finished, with backward and what it recomputes."""


class ExactLayers:
    """Checkpointed layers that exchange by all ways of the symmetric transport, forward and backward.

    Args:
        axis: The ranks, with uneven shares of tokens and heads.
        depth: Number of layers.
        device: Of the numbers.
    """

    def __init__(self, axis: Axis, depth: int, device: torch.device | str = "cpu") -> None:
        self._axis, self._depth, self._device = axis, depth, device
        self._lengths = tuple(20 + 3 * rank for rank in range(axis.size))
        self._heads = assign_heads(axis.rank, self._lengths, self._lengths, HEADS, HEADS)

    def draw(self, seed: int) -> list[Tensor]:
        """Inputs, signs of each layer and gradients of its output, alike on all ranks."""
        generator = torch.Generator(self._device).manual_seed(seed)
        tokens = sum(self._lengths)

        def whole_numbers(*shape: int, most: int = 1000) -> Tensor:
            numbers = torch.randint(-most, most + 1, shape, generator=generator, device=self._device)
            return numbers.to(torch.float64)

        signs = whole_numbers(self._depth, 1, tokens, 1, DIM).sign()
        return [
            whole_numbers(1, 1, tokens, HEADS, DIM),
            signs + (signs == 0),
            whole_numbers(self._depth, 1, tokens, HEADS, DIM),
        ]

    def mine(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tokens."""
        return [x.split(self._lengths, TOKENS)[self._axis.rank] for x in whole]

    def run(self, inputs: Sequence[Tensor], transport: Transport | None = None) -> list[Tensor]:
        """Returns the outputs of all layers and the gradients of inputs and signs.

        Args:
            inputs: As drawn, of this rank's tokens; without a transport of all tokens.
            transport: What sends messages; nothing is exchanged without.
        """
        x, signs = (each.detach().requires_grad_() for each in inputs[:2])
        layer = _whole if transport is None else partial(_split, Ulysses(self._axis, self._heads, transport))
        hidden, outputs = x[0], []
        for sign in signs.unbind():
            hidden = checkpoint(layer, hidden, sign, use_reentrant=False, preserve_rng_state=False)
            outputs.append(hidden)
        stacked = torch.stack(outputs)
        return [stacked.detach(), *torch.autograd.grad(stacked, (x, signs), inputs[2])]

    def are_wrong(self, inputs: Sequence[Tensor], transport: Transport) -> Tensor:
        """Whether a number of this rank's differs from that of the whole sequence; the host does not wait."""
        pairs = zip(self.run(self.mine(inputs), transport), self.mine(self.run(inputs)), strict=True)
        return torch.stack([(got != expected).any() for got, expected in pairs]).any()


def _parts(x: Tensor, sign: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x * sign, x.flip(3), -x, x.roll(1, 2)


def _choose(*parts: Tensor) -> Tensor:
    """Takes every fourth token of each part, and moves all of them on by one token, from rank to rank at the ends."""
    place = torch.arange(parts[0].shape[2], device=parts[0].device).view(1, 1, -1, 1) % len(parts)
    chosen = [part * (place == number) for number, part in enumerate(parts)]
    return torch.stack(chosen).sum(0).roll(1, 2)


def _whole(x: Tensor, sign: Tensor) -> Tensor:
    return _choose(*(part.transpose(1, 2) for part in _parts(x, sign))).transpose(1, 2)


def _split(ulysses: Ulysses, x: Tensor, sign: Tensor) -> Tensor:
    first, *others = _parts(x, sign)
    fetched: Tensor = _FetchHeads.apply(first, ulysses)  # type: ignore[no-untyped-call]
    return gather_heads(_choose(fetched, *scatter_heads(others[0], others[1], others[2], ulysses)), ulysses)


class _FetchHeads(torch.autograd.Function):
    """`scatter_heads` of one tensor whose pieces are written to the transport's memory, from where peers fetch them.

    Gradients come back as columns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ulysses: Ulysses) -> Tensor:
        ctx.ulysses = ulysses
        axis, transport, shares = ulysses.axis, ulysses.transport, ulysses.heads.out
        batch, _, _, dim = x.shape
        send, receive = times(shares.by_heads, batch * dim), times(shares.by_tokens, batch * dim)
        exchange = transport.begin(x, send, receive, axis)
        pieces = pack([x], shares).split(send)
        for step in range(1, axis.size + 1):
            peer = (axis.rank + step) % axis.size
            exchange.pieces[peer].copy_(pieces[peer])
            exchange.send(peer)
        return transport.wait(exchange).view(-1, batch, sum(shares.mine), dim).permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        coming = return_columns(rows_of(grad), ctx.ulysses, grad.shape[0])
        columns = coming.wait(keep=True).unflatten(2, (HEADS, DIM))
        coming.done()
        return columns, None


class DisturbedTransport(SymmetricTransport):
    """Calls `disturbance` before it begins or finishes an exchange."""

    disturbance: Callable[[], None] = staticmethod(lambda: None)
    """May be set on an object."""

    def all_to_all(self, *args: Any) -> Any:
        self.disturbance()
        return super().all_to_all(*args)

    def begin(self, *args: Any) -> Any:
        self.disturbance()
        return super().begin(*args)

    def begin_columns(self, *args: Any) -> Any:
        self.disturbance()
        coming = super().begin_columns(*args)
        self.disturbance()
        return coming

    def wait(self, *args: Any) -> Tensor:
        self.disturbance()
        return super().wait(*args)


def failure_after(calls: int | None) -> Callable[[], None]:
    """A disturbance that raises what a full device does, once it was called so often; never for None."""
    count = 0

    def disturbance() -> None:
        nonlocal count
        count += 1
        if calls is not None and count > calls:
            raise torch.OutOfMemoryError(f"injected after {calls} calls")

    return disturbance
