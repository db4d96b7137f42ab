"""Attention that is computed for one rank's queries after the other, each sent to it while the next is computed.

In backward the heads' gradients are slices of a matrix product, as in `projecting`. Attention's own backward is that of
all queries at once: gradients of keys are not summed over slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.dispatch import attention_part
from lightning_videoscale.parallel.schedules.messages import (
    HeadSource,
    heads_first,
    peers_of,
    return_tokens,
    rows_of,
    scatter_heads_of,
)
from lightning_videoscale.parallel.transport import Exchange
from lightning_videoscale.parallel.ulysses import Ulysses, times
from lightning_videoscale.parallel.words import by_words


class AttentionCall(NamedTuple):
    """What is no tensor; see `attention_output.attend_and_send`."""

    ulysses: Ulysses
    lengths: Sequence[Sequence[int]]
    choices: AttentionChoices
    scale: float
    padded_rows: bool
    is_open: bool = False


class OutputCall(NamedTuple):
    """What is no tensor of a projection; see `attention_output.project_output`."""

    ulysses: Ulysses
    by_slices: bool


def attend_by_ranks(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Exchange]:
    """Returns output, with tokens before heads in memory, and log-sum-exp, and what brings this rank's tokens."""
    ulysses, places = call.ulysses, _places(call.lengths)
    shares, (batch, heads, _, dim) = ulysses.heads.out, query.shape
    send, receive = times(shares.by_tokens, batch * dim), times(shares.by_heads, batch * dim)
    message = query.new_empty(sum(send))
    exchange = ulysses.transport.open(message, send, receive, ulysses.axis)
    joint = len(places[0]) > 1
    # Of one stream, the message is what attention returns.
    out = heads_first((torch.empty_like(message) if joint else message).view(-1, heads, dim), batch)
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for peer in peers_of(ulysses):
        asking = [query[:, :, tokens] for tokens in places[peer]]
        part, part_lse = attention_part(
            call.choices, _joined(asking), key, value, call.scale, mask, is_open=call.is_open
        )
        if call.padded_rows and mask is not None:
            there = torch.cat([mask[:, tokens] for tokens in places[peer]], 1)
            part = part.masked_fill(there.logical_not()[:, None, :, None], 0.0)
        heads_first(message.split(send)[peer].view(-1, heads, dim), batch).copy_(part)
        exchange.send(peer)
        counts = [each.shape[2] for each in asking]
        for tokens, x, logs in zip(places[peer], part.split(counts, 2), part_lse.split(counts, 2), strict=True):
            lse[:, :, tokens] = logs
            if joint:
                out[:, :, tokens] = x
    return out, lse, exchange


def _places(lengths: Sequence[Sequence[int]]) -> list[list[slice]]:
    """Of each rank, where its tokens of each stream are."""
    stops = list(accumulate(length for stream in lengths for length in stream))
    flat = [slice(stop - length, stop) for stop, length in zip(stops, chain(*lengths), strict=True)]
    ranks = len(lengths[0])
    return [flat[rank::ranks] for rank in range(ranks)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else by_words(partial(torch.cat, dim=2), parts)


def joined_output(out: Tensor, ulysses: Ulysses) -> Tensor:
    """This rank's tokens with all heads, (B, s, H · D), of (B, h, S, D)."""
    return return_tokens(rows_of(out), ulysses, out.shape[0])()


def project_joined(joined: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The output projection, if there is one."""
    joined = joined.contiguous()  # of another, torch rounds a product before it adds the bias
    return joined if weight is None else F.linear(joined, weight, bias)


def send_output_gradients(
    call: OutputCall, dy: Tensor, joined: Tensor | None, weight: Tensor | None, dim: int, needs: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the heads of all tokens, (B, h, S, D), and of weight and bias, while those heads are sent.

    Args:
        call: Of the projection.
        dy: (B, s, C).
        joined: What was projected, (B, s, H · D); None if there is no weight.
        weight: (C, H · D), or None.
        dim: D.
        needs: Whether gradients of weight and bias are needed.
    """
    ulysses, batch, flat = call.ulysses, dy.shape[0], dy.flatten(0, 1)
    heads = (dy if weight is None else weight).shape[-1] // dim
    rows = dy.transpose(0, 1).reshape(flat.shape)
    source = (
        HeadSource(rows, None, None, dy, heads) if weight is None else HeadSource(rows, weight.t(), None, None, heads)
    )
    sent = scatter_heads_of(source, batch, ulysses, by_slices=call.by_slices)
    of_weight = flat.t() @ joined.flatten(0, 1) if needs[0] and joined is not None else None
    of_bias = flat.sum(0) if needs[1] else None
    return heads_first(sent.received(ulysses, batch), batch), of_weight, of_bias
