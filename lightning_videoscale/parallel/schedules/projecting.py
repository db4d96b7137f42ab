"""Query, key and value, sent one after the other behind each other's matrix products. Forward and backward.

The weight's rows that make one rank's heads are one matrix product, whose output is that rank's message: nothing is
packed. In backward the gradients of heads lie as they are sent, and come back as columns of one matrix. The value's go
first, as the norms of query and key need a sum over ranks. Each weight's gradient is computed while the next message is
on its way; behind the first one there is no other, so that the rows of the value's weight that make this rank's own
heads come before it.

Under "overlap" a projection is one matrix product, whose output is copied apart into messages; all else is the same.

Where a Linear is more than its weight and bias (LoRA, hooks), what it returns is sent in its place. So which messages
there are, and in which order, does not depend on what a rank has in a Linear's place.

Rounding is that of serial code: no sum is split that is not split there. For the shapes see `messages`; C are the
channels of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.parallel.schedules.across_heads import BeforeNorm, NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.messages import (
    HeadSource,
    OwnColumns,
    heads_first,
    own_columns,
    return_columns,
    rows_of,
    scatter_heads_of,
    send_to_all,
    sum_over_ranks,
)
from lightning_videoscale.parallel.transport import ColumnExchange
from lightning_videoscale.parallel.ulysses import Ulysses


class ProjectionCall(NamedTuple):
    """What is no tensor.

    Attributes:
        ulysses: The group, of two ranks or more.
        norm: Of query and key, over all heads; None leaves norms to the caller.
        heads: H.
        by_slices: As for `input_projections.project_heads`.
    """

    ulysses: Ulysses
    norm: NormAcrossHeads | None
    heads: int
    by_slices: bool


def project_and_send(call: ProjectionCall, *tensors: Any) -> tuple[Tensor, ...]:
    """Query, key and value; and before a norm over all heads what `BeforeNorm` has.

    The tensors are x; weight and bias of query, key, value; their results; the norm's two weights and two tables.
    """
    ulysses, norm, heads, by_slices = call
    x, parameters, results, of_norm = tensors[0], tensors[1:7], tensors[7:10], tensors[10:]
    batch, rows = x.shape[0], x.transpose(0, 1).reshape(-1, x.shape[2])
    linears = zip(parameters[0::2], parameters[1::2], results, strict=True)
    sources = [HeadSource(rows, weight, bias, result, heads) for weight, bias, result in linears]
    query, key = (scatter_heads_of(source, batch, ulysses, by_slices=by_slices) for source in sources[:2])
    if norm is not None:
        statistics = send_to_all(norm.square_sums(query.pieces, key.pieces), ulysses, batch)
    value = scatter_heads_of(sources[2], batch, ulysses, by_slices=by_slices)
    qk = query.received(ulysses, batch), key.received(ulysses, batch)
    before_norm: tuple[Tensor, ...] = ()
    if norm is not None:
        before_norm = BeforeNorm(*qk, norm.rstds(ulysses.transport.wait(statistics).view(-1, 2)))
        qk = norm.forward(before_norm, NormTensors(of_norm[:2], of_norm[2:]))
    return *(heads_first(each, batch) for each in (*qk, value.received(ulysses, batch))), *before_norm


def kept(tensors: Sequence[Tensor | None], before_norm: Sequence[Tensor]) -> list[Tensor | None]:
    """What `send_gradients` needs of the tensors of `project_and_send`, and of what that returned."""
    return [tensors[0], *tensors[1:7:2], *tensors[10:], *before_norm]


def send_gradients(
    call: ProjectionCall, gradients: Sequence[Tensor], saved: Sequence[Any], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of those tensors that need one, but for the norm's tables."""
    ulysses, norm, *_ = call
    x, weights, tensors = saved[0], saved[1:4], NormTensors(saved[4:6], saved[6:8])
    batch = x.shape[0]
    dq, dk, dv = (rows_of(g) for g in gradients)
    value = return_columns(dv, ulysses, batch)
    if norm is None:
        key, query = (return_columns(rows, ulysses, batch) for rows in (dk, dq))
    else:
        before_norm = BeforeNorm(*saved[8:])
        sums = sum_over_ranks(norm.gradient_sums(dq, dk, before_norm, tensors), ulysses)
    home = _Home(x.flatten(0, 1), weights, needs)
    home.take(2, value, own_columns(dv, ulysses, batch))
    of_norm: Sequence[Tensor | None] = (None, None)
    if norm is not None:
        dq, dk, *of_norm = norm.backward(dq, dk, before_norm, sums(), tensors)
        key, query = (return_columns(rows, ulysses, batch) for rows in (dk, dq))
    home.finish(2)
    for i, coming in ((1, key), (0, query)):
        home.take(i, coming)
        home.finish(i)
    dx = None if home.of_input is None else home.of_input.view_as(x)
    of_norm = [g if needed else None for g, needed in zip(of_norm, needs[10:12], strict=True)]
    return [dx, *home.of_parameters, *home.of_results, *of_norm]


class _Home:
    """Gradients of this rank's tokens, as those of query, key and value come back one by one.

    Attributes:
        of_parameters: Of weight and bias of each.
        of_results: (B, s, H · D) of each of the three; None where nobody needs it.
        of_input: (B · s, C), of those that were added so far; None if nothing was.
    """

    def __init__(self, x: Tensor, weights: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        self._x, self._weights, self._needs = x, weights, needs
        self._there: dict[int, tuple[ColumnExchange, Tensor]] = {}
        self.of_parameters: list[Tensor | None] = [None] * 6
        self.of_results: list[Tensor | None] = [None] * 3
        self.of_input: Tensor | None = None

    def take(self, i: int, coming: ColumnExchange, own: OwnColumns | None = None) -> None:
        """Computes what a Linear's parameters need; other messages are on their way, and while ``own`` is used, all."""
        needed = self._needs[1 + 2 * i]
        gradient = self._with_own_rows(own) if needed and own is not None else None
        dy = coming.wait(keep=self._needs[7 + i])
        self._there[i] = coming, dy
        flat = dy.flatten(0, 1)
        if gradient is not None and own is not None:
            self._write_other_rows(gradient, own.place, flat)
        elif needed:
            gradient = flat.t() @ self._x
        self.of_parameters[2 * i] = gradient
        self.of_parameters[2 * i + 1] = flat.sum(0) if self._needs[2 + 2 * i] else None
        self.of_results[i] = dy if self._needs[7 + i] else None

    def _with_own_rows(self, own: OwnColumns) -> Tensor:
        """A weight's gradient, (H · D, C), of which there are the rows that make this rank's heads."""
        gradient = self._x.new_empty(own.width, self._x.shape[1])
        torch.mm(own.columns.t(), self._x, out=gradient[own.place])
        return gradient

    def _write_other_rows(self, gradient: Tensor, own: slice, flat: Tensor) -> None:
        for rows in (slice(0, own.start), slice(own.stop, len(gradient))):
            if rows.start < rows.stop:
                torch.mm(flat[:, rows].t(), self._x, out=gradient[rows])

    def finish(self, i: int) -> None:
        """Adds the gradient of the input through a Linear, as it is computed, and gives back what has come."""
        coming, dy = self._there.pop(i)
        flat, weight = dy.flatten(0, 1), self._weights[i]
        if weight is not None and self._needs[0]:
            self.of_input = flat @ weight if self.of_input is None else self.of_input.addmm_(flat, weight)
        coming.done()
