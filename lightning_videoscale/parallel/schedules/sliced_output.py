"""Attention that is computed for one rank's queries after the other, each sent to it while the next is computed.

In backward the heads' gradients are slices of a matrix product, as in `sliced_input`. Attention's own backward is that
of all queries at once: gradients of keys are not summed over slices.
"""

from __future__ import annotations

from itertools import accumulate
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
    Linear,
    Source,
    as_computed,
    heads_first,
    joined_heads,
    peers_of,
    return_tokens,
    rows_of,
    scatter_heads_of,
)
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
    _, *parameters = as_computed(query, linear if linear is not None else (None, None))
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = _AttendAndProject.apply(  # type: ignore[no-untyped-call]
            (ulysses, choices, scale), query, key, value, *parameters
        )
    return out


def project_output(out: Tensor, linear: Linear | None, ulysses: Ulysses) -> Tensor:
    """Scatters the sequence, gathers the heads and projects them, after attention of another kind (a ring's).

    Args:
        out: (B, h, S, D), what attention returned.
        linear: As for `attend_and_project`.
        ulysses: The group, of two ranks or more.

    Returns:
        As `attend_and_project`.
    """
    _, *parameters = as_computed(out, linear if linear is not None else (None, None))
    with torch.autocast(out.device.type, enabled=False):
        projected: Tensor = _Project.apply(ulysses, out, *parameters)  # type: ignore[no-untyped-call]
    return projected


class _AttendAndProject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Ulysses, AttentionChoices, float],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        (ulysses, choices, scale), shares = call, call[0].heads.out
        batch, heads, _, dim = query.shape
        send, receive = times(shares.by_tokens, batch * dim), times(shares.by_heads, batch * dim)
        message = query.new_empty(sum(send))
        exchange = ulysses.transport.open(message, send, receive, ulysses.axis)
        stops = list(accumulate(size // heads for size in shares.by_tokens))
        lse = [query.new_empty(0)] * len(stops)
        for peer in peers_of(ulysses):
            tokens = slice(stops[peer - 1] if peer else 0, stops[peer])
            out, lse[peer] = attention_part(choices, query[:, :, tokens], key, value, scale, None)
            heads_first(message.split(send)[peer].view(-1, heads, dim), batch).copy_(out)
            exchange.send(peer)
        joined = joined_heads(ulysses.transport.wait(exchange), ulysses, batch, dim)
        ctx.call = call
        ctx.save_for_backward(query, key, value, message, torch.cat(lse, 2), joined, weight)
        return joined if weight is None else F.linear(joined, weight, bias)

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ulysses, choices, scale = ctx.call
        query, key, value, message, lse, joined, weight = ctx.saved_tensors
        batch, heads, _, dim = query.shape
        grad_out, *of_linear = _gradients(gradients[0], joined, weight, ulysses, dim, ctx.needs_input_grad[4:])
        out = heads_first(message.view(-1, heads, dim), batch)
        of_heads = attention_part_backward(choices, grad_out, query, key, value, out, lse, scale, None)
        return None, *of_heads, *of_linear


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        joined = return_tokens(rows_of(out), ulysses, out.shape[0])()
        ctx.ulysses, ctx.dim = ulysses, out.shape[3]
        ctx.save_for_backward(joined, weight)
        return joined if weight is None else F.linear(joined, weight, bias)

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        joined, weight = ctx.saved_tensors
        return None, *_gradients(gradients[0], joined, weight, ctx.ulysses, ctx.dim, ctx.needs_input_grad[2:])


def _gradients(
    dy: Tensor, joined: Tensor, weight: Tensor | None, ulysses: Ulysses, dim: int, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the heads of all tokens, (B, h, S, D), and of weight and bias, while those heads travel."""
    batch, heads, flat = dy.shape[0], joined.shape[2] // dim, dy.flatten(0, 1)
    rows = dy.transpose(0, 1).reshape(flat.shape)
    source = Source(rows, None, None, dy, heads) if weight is None else Source(rows, weight.t(), None, None, heads)
    sent = scatter_heads_of(source, batch, ulysses)
    of_weight = flat.t() @ joined.flatten(0, 1) if needs[0] else None
    of_bias = flat.sum(0) if needs[1] else None
    return heads_first(sent.received(ulysses, batch), batch), of_weight, of_bias
