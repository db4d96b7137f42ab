"""`attending` as ops for compiled code, see `ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention.op import attention_backward_op, chooser
from lightning_videoscale.kernels.autograd import register_autograd
from lightning_videoscale.parallel.schedules.attending import (
    AttentionCall,
    OutputCall,
    attend_by_ranks,
    joined_output,
    project_joined,
    send_output_gradients,
)
from lightning_videoscale.parallel.schedules.messages import heads_first, joined_heads
from lightning_videoscale.parallel.schedules.ops import PLACE, define, define_backward, ulysses_of

# -- attention -----------------------------------------------------------------------------------------------------


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    padded_rows: bool,
    number: int,
    by_stream: Sequence[int],
    *place: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    ulysses, ranks = ulysses_of(*place), len(place[0])
    lengths = [by_stream[first : first + ranks] for first in range(0, len(by_stream), ranks)]
    call = AttentionCall(ulysses, lengths, chooser(number), scale, padded_rows)
    out, lse, exchange = attend_by_ranks(call, query, key, value, mask)
    return out, joined_heads(exchange, ulysses, query.shape[0]), lse


def _attend_fake(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, tokens, dim), (_, all_heads, _, tokens_here, _) = query.shape, arguments[-5:]
    out = heads_first(query.new_empty(tokens * batch, heads, dim), batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    arrived = query.new_empty(batch, tokens_here, all_heads * dim)
    return out, arrived, query.new_empty(query.shape[:3], dtype=wide)


def _attend_save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    query, key, value, mask, ctx.scale, _, ctx.chooser, *_ = inputs
    out, arrived, lse = outputs
    ctx.save_for_backward(query, key, value, out, lse, mask)
    ctx.mark_non_differentiable(arrived, lse)


def _attend_differentiate(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    of_heads = attention_backward_op(gradient, *ctx.saved_tensors, ctx.scale, True, ctx.chooser)
    return *of_heads, *[None] * (len(ctx.needs_input_grad) - 3)


attend_and_send_op = register_autograd(
    define(
        "attend_and_send",
        "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool padded_rows, SymInt chooser,"
        f" SymInt[] by_stream, {PLACE}) -> (Tensor, Tensor, Tensor)",
        _attend,
        _attend_fake,
    ),
    _attend_differentiate,
    _attend_save,
)


# -- its projection ------------------------------------------------------------------------------------------------


def _project(
    out: Tensor, arrived: Tensor | None, weight: Tensor | None, bias: Tensor | None, by_slices: bool, *place: Any
) -> list[Tensor]:
    """What is projected, and behind it what was, where both are new: an op must not return what it is given."""
    if arrived is not None:
        projected = project_joined(arrived, weight, bias)
        return [projected.clone() if weight is None else projected]
    joined = joined_output(out, ulysses_of(*place))
    return [joined] if weight is None else [project_joined(joined, weight, bias), joined]


def _project_fake(
    out: Tensor, arrived: Tensor | None, weight: Tensor | None, bias: Tensor | None, by_slices: bool, *place: Any
) -> list[Tensor]:
    _, heads, _, tokens, _ = place
    shape = out.shape[0], tokens
    joined = out.new_empty(*shape, heads * out.shape[3])
    projected = [] if weight is None else [out.new_empty(*shape, weight.shape[0])]
    return projected if projected and arrived is not None else [*projected, joined]


def _project_save(ctx: Any, inputs: tuple[Any, ...], outputs: list[Tensor]) -> None:
    out, arrived, weight, _, *ctx.how = inputs
    joined = None if weight is None else outputs[1] if arrived is None else arrived
    ctx.save_for_backward(joined, weight)
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.dim = out.shape[3]


def _project_differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad)
    there = iter(_project_backward_op(gradients[0], *ctx.saved_tensors, ctx.dim, needs[2:4], *ctx.how))
    of_out = next(there)
    return of_out, None, *(next(there) if each else None for each in needs[2:4]), *[None] * (len(needs) - 4)


def _project_backward(
    dy: Tensor,
    joined: Tensor | None,
    weight: Tensor | None,
    dim: int,
    needs: Sequence[bool],
    by_slices: bool,
    *place: Any,
) -> list[Tensor]:
    call = OutputCall(ulysses_of(*place), by_slices)
    return [g for g in send_output_gradients(call, dy, joined, weight, dim, needs) if g is not None]


def _project_backward_fake(
    dy: Tensor,
    joined: Tensor | None,
    weight: Tensor | None,
    dim: int,
    needs: Sequence[bool],
    by_slices: bool,
    *place: Any,
) -> list[Tensor]:
    lengths, _, mine, *_ = place
    batch = dy.shape[0]
    found = [heads_first(dy.new_empty(sum(lengths) * batch, mine, dim), batch)]
    if needs[0]:
        assert weight is not None
        found.append(dy.new_empty(weight.shape))
    return [*found, dy.new_empty(dy.shape[2])] if needs[1] else found


_HOW = f"bool by_slices, {PLACE}"

_project_backward_op = define_backward(
    "project_output_backward",
    f"(Tensor dy, Tensor? joined, Tensor? weight, int dim, bool[] needs, {_HOW}) -> Tensor[]",
    _project_backward,
    _project_backward_fake,
    returns_list=True,
)
project_output_op = register_autograd(
    define(
        "project_output",
        f"(Tensor out, Tensor? arrived, Tensor? weight, Tensor? bias, {_HOW}) -> Tensor[]",
        _project,
        _project_fake,
    ),
    _project_differentiate,
    _project_save,
    returns_list=True,
)
