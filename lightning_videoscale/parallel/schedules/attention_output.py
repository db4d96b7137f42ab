"""Attention that is computed for one rank's queries after the other, each sent to it while the next is computed.

In backward the heads' gradients are slices of a matrix product, as in `input_projections`. Attention's own backward
is that of all queries at once: gradients of keys are not summed over slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.dispatch import attention_part, attention_part_backward
from lightning_videoscale.kernels.autograd import in_dtypes_of_forward
from lightning_videoscale.parallel.derivatives import differentiable_once
from lightning_videoscale.parallel.schedules.messages import (
    SECOND_DERIVATIVE,
    HeadSource,
    Linear,
    as_computed,
    heads_first,
    joined_heads,
    peers_of,
    return_tokens,
    rows_of,
    scatter_heads_of,
)
from lightning_videoscale.parallel.transport import Exchange
from lightning_videoscale.parallel.ulysses import Ulysses, times


def attend_and_project(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    linear: Linear | None,
    ulysses: Ulysses,
    choices: AttentionChoices,
    scale: float,
) -> Tensor:
    """Attends, scatters the sequence and gathers the heads, and projects them.

    Args:
        query: (B, h, S, D).
        key: Likewise.
        value: Likewise.
        linear: The output projection, of weight (C, H · D); None leaves it to the caller.
        ulysses: The group, of two ranks or more.
        choices: What chooses the kernel of attention.
        scale: Factor on the logits.

    Returns:
        (B, s, C), or (B, s, H · D); differentiable once.
    """
    shares = ulysses.heads.out
    lengths = [size // shares.mine[0] for size in shares.by_tokens]
    out, arriving = attend_and_send(query, key, value, ulysses, [lengths], choices, scale)
    return project_output(out, linear, ulysses, arriving())


def attend_and_send(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ulysses: Ulysses,
    lengths: Sequence[Sequence[int]],
    choices: AttentionChoices,
    scale: float,
    mask: Tensor | None = None,
    *,
    padded_rows: bool = False,
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Attends, and sends every rank what becomes of its tokens as soon as it is computed.

    Args:
        query: (B, h, S, D), all tokens of a stream before those of the next.
        key: Likewise.
        value: Likewise.
        ulysses: The group, of two ranks or more; with the tokens of all streams together.
        lengths: Of each stream, the tokens of each rank.
        choices: What chooses the kernel of attention.
        scale: Factor on the logits.
        mask: (B, S) bool, True where a key may be attended.
        padded_rows: Whether tokens that may not be attended get zeros. Their gradient is the caller's to clear.

    Returns:
        (B, h, S, D), differentiable once, and what waits for the heads that come here, (B, s, H · D), with the streams
        one behind the other. The latter has no gradient: it is for `project_output`, with the former.
    """
    exchanges: list[Exchange] = []
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _AttendAndSend.apply(  # type: ignore[no-untyped-call]
            (ulysses, _places(lengths), choices, scale, padded_rows, exchanges), query, key, value, mask
        )
    batch = query.shape[0]
    return out, lambda: joined_heads(exchanges.pop(), ulysses, batch)


def project_output(
    out: Tensor, linear: Linear | None, ulysses: Ulysses, arrived: Tensor | None = None, *, by_slices: bool = True
) -> Tensor:
    """Scatters the sequence, gathers the heads and projects them, after attention.

    Args:
        out: (B, h, S, D), what attention returned.
        linear: As for `attend_and_project`.
        ulysses: The group, of two ranks or more.
        arrived: (B, s, H · D), what comes of ``out`` here, if it was sent already.
        by_slices: As for `project_heads`, of the matrix product in backward.

    Returns:
        As `attend_and_project`.
    """
    parameters: Sequence[Tensor | None] = (None, None)
    if linear is not None:
        out, *parameters = as_computed(out, linear)  # type: ignore[assignment]
    with torch.autocast(out.device.type, enabled=False):
        projected: Tensor = _Project.apply((ulysses, by_slices), arrived, out, *parameters)  # type: ignore[no-untyped-call]
    return projected


def _places(lengths: Sequence[Sequence[int]]) -> list[list[slice]]:
    """Of each rank, where its tokens of each stream are."""
    stops = list(accumulate(length for stream in lengths for length in stream))
    flat = [slice(stop - length, stop) for stop, length in zip(stops, chain(*lengths), strict=True)]
    ranks = len(lengths[0])
    return [flat[rank::ranks] for rank in range(ranks)]


class _AttendAndSend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        ulysses, places, choices, scale, padded_rows, exchanges = call
        shares, (batch, heads, _, dim) = ulysses.heads.out, query.shape
        send, receive = times(shares.by_tokens, batch * dim), times(shares.by_heads, batch * dim)
        message = query.new_empty(sum(send))
        exchange = ulysses.transport.open(message, send, receive, ulysses.axis)
        exchanges.append(exchange)
        joint = len(places[0]) > 1
        # Of one stream, the message is what attention returns.
        out = torch.empty_like(query) if joint else heads_first(message.view(-1, heads, dim), batch)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for peer in peers_of(ulysses):
            asking = [query[:, :, tokens] for tokens in places[peer]]
            part, part_lse = attention_part(choices, _joined(asking), key, value, scale, mask)
            if padded_rows and mask is not None:
                there = torch.cat([mask[:, tokens] for tokens in places[peer]], 1)
                part = part.masked_fill(there.logical_not()[:, None, :, None], 0.0)
            heads_first(message.split(send)[peer].view(-1, heads, dim), batch).copy_(part)
            exchange.send(peer)
            counts = [each.shape[2] for each in asking]
            for tokens, x, logs in zip(places[peer], part.split(counts, 2), part_lse.split(counts, 2), strict=True):
                lse[:, :, tokens] = logs
                if joint:
                    out[:, :, tokens] = x
        ctx.call = choices, scale
        ctx.save_for_backward(query, key, value, out, lse, mask)
        return out

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        choices, scale = ctx.call
        query, key, value, out, lse, mask = ctx.saved_tensors
        of_heads = attention_part_backward(choices, gradients[0], query, key, value, out, lse, scale, mask)
        return None, *of_heads, None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Ulysses, bool],
        arrived: Tensor | None,
        out: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ulysses = call[0]
        joined = return_tokens(rows_of(out), ulysses, out.shape[0])() if arrived is None else arrived.to(out.dtype)
        joined = joined.contiguous()  # of another, torch rounds a product before it adds the bias
        ctx.call, ctx.dim = call, out.shape[3]
        ctx.save_for_backward(joined, weight)
        return joined if weight is None else F.linear(joined, weight, bias)

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        joined, weight = ctx.saved_tensors
        of_all = _gradients(gradients[0], joined, weight, ctx.call, ctx.dim, ctx.needs_input_grad[3:])
        return None, None, *of_all


def _gradients(
    dy: Tensor, joined: Tensor, weight: Tensor | None, call: tuple[Ulysses, bool], dim: int, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the heads of all tokens, (B, h, S, D), and of weight and bias, while those heads travel."""
    (ulysses, by_slices), batch, heads, flat = call, dy.shape[0], joined.shape[2] // dim, dy.flatten(0, 1)
    rows = dy.transpose(0, 1).reshape(flat.shape)
    source = (
        HeadSource(rows, None, None, dy, heads) if weight is None else HeadSource(rows, weight.t(), None, None, heads)
    )
    sent = scatter_heads_of(source, batch, ulysses, by_slices=by_slices)
    of_weight = flat.t() @ joined.flatten(0, 1) if needs[0] else None
    of_bias = flat.sum(0) if needs[1] else None
    return heads_first(sent.received(ulysses, batch), batch), of_weight, of_bias
