"""Attention whose output is sent as it is computed, and the projection behind it: what layers call.

What is computed is in `attending`. Eager code runs it inside autograd functions, compiled code as ops, see
`input_projections`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.dispatch import attention_part_backward, refuse_modes
from lightning_videoscale.kernels.autograd import in_dtypes_of_forward
from lightning_videoscale.parallel.derivatives import differentiable_once
from lightning_videoscale.parallel.schedules.attending import (
    AttentionCall,
    OutputCall,
    attend_by_ranks,
    joined_output,
    project_joined,
    send_output_gradients,
)
from lightning_videoscale.parallel.schedules.messages import SECOND_DERIVATIVE, Linear, as_computed, joined_heads
from lightning_videoscale.parallel.schedules.ops import place_of
from lightning_videoscale.parallel.schedules.output_ops import attend_and_send_op, project_output_op
from lightning_videoscale.parallel.transport import Exchange
from lightning_videoscale.parallel.ulysses import Ulysses


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
    is_open: bool = False,
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
        is_open: Every sample of the mask is known to have a key that may be attended.

    Returns:
        (B, h, S, D), differentiable once, and what waits for the heads that come here, (B, s, H · D), with the streams
        one behind the other. The latter has no gradient: it is for `project_output`, with the former.

    Raises:
        ValueError: Inside of a mode of torch that may change attention.
    """
    out: Tensor
    refuse_modes("The schedule 'sliced'")
    if torch.compiler.is_compiling():  # where it has arrived already: nothing is computed before it is waited for
        how = scale, padded_rows, choices.number, list(chain(*lengths)), *place_of(ulysses)
        out, arrived, _ = attend_and_send_op(query, key, value, mask, *how)
        return out, lambda: arrived
    exchanges: list[Exchange] = []
    with torch.autocast(query.device.type, enabled=False):
        call = AttentionCall(ulysses, lengths, choices, scale, padded_rows, is_open)
        out = _AttendAndSend.apply(call, exchanges, query, key, value, mask)  # type: ignore[no-untyped-call]
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
    arrived = None if arrived is None else arrived.to(out.dtype)
    projected: Tensor
    if torch.compiler.is_compiling():
        projected, *_ = project_output_op(out, arrived, *parameters, by_slices, *place_of(ulysses))
        return projected
    with torch.autocast(out.device.type, enabled=False):
        call = OutputCall(ulysses, by_slices)
        projected = _Project.apply(call, arrived, out, *parameters)  # type: ignore[no-untyped-call]
    return projected


class _AttendAndSend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        exchanges: list[Exchange],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        out, lse, exchange = attend_by_ranks(call, query, key, value, mask)
        exchanges.append(exchange)
        ctx.call, ctx.returns = (call.choices, call.scale, call.is_open), "slice"
        ctx.save_for_backward(query, key, value, out, lse, mask)
        return out

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        choices, scale, is_open = ctx.call
        query, key, value, out, lse, mask = ctx.saved_tensors
        of_heads = attention_part_backward(
            choices, gradients[0], query, key, value, out, lse, scale, mask, is_open=is_open
        )
        return None, None, *of_heads, None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: OutputCall,
        arrived: Tensor | None,
        out: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        joined = joined_output(out, call.ulysses) if arrived is None else arrived
        ctx.call, ctx.dim, ctx.returns = call, out.shape[3], "slice"
        ctx.save_for_backward(joined, weight)
        return project_joined(joined, weight, bias)

    @staticmethod
    @differentiable_once(SECOND_DERIVATIVE)
    @in_dtypes_of_forward
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        joined, weight = ctx.saved_tensors
        of_all = send_output_gradients(ctx.call, gradients[0], joined, weight, ctx.dim, ctx.needs_input_grad[3:])
        return None, None, *of_all
