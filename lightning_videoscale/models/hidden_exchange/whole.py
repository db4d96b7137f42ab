"""The whole of what a rank has a slice of, rotary tables and masks: `whole_of`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.autograd import register_autograd
from lightning_videoscale.parallel import SequenceContext
from lightning_videoscale.parallel.group_numbers import group_of
from lightning_videoscale.parallel.schedules.ops import define, define_backward
from lightning_videoscale.parallel.sharding import gather_inside, gradient_of_slices


def whole_of(x: Tensor, dim: int, streams: tuple[str, ...], context: SequenceContext, *, keep: bool) -> Tensor:
    """Returns the tokens of all ranks, as the pass has noted them (``keep``: for other layers, too), or gathered."""
    if torch.compiler.is_compiling():
        lengths = [length for stream in streams for length in context.lengths((stream,))]
        counts = [context.record.tokens(stream) for stream in streams]
        out: Tensor = _op(x, dim, list(streams), keep, lengths, counts, context.number)
        return out
    found = context.record.find_whole(x) if keep else None
    if found is None:
        found = _gathered(x, dim, streams, context)
        if keep:
            context.keep_whole(x, found)
    return found


def _gathered(x: Tensor, dim: int, streams: Sequence[str], context: SequenceContext) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(gather_inside(torch.view_as_real(x), dim, context, streams))
    if x.dtype is torch.bool:
        return gather_inside(x.to(torch.uint8), dim, context, streams).bool()
    return gather_inside(x, dim, context, streams)


# -- for compiled code ---------------------------------------------------------------------------------------------


def _run(x: Tensor, dim: int, streams: list[str], keep: bool, *numbers: Any) -> Tensor:
    context: Any = group_of(numbers[2])
    found: Tensor | None = context.record.find_whole(x) if keep else None
    if found is None:
        return _gathered(x, dim, streams, context).contiguous()
    return found.clone(memory_format=torch.contiguous_format)  # compiled code may write where it was


def _fake(x: Tensor, dim: int, streams: list[str], keep: bool, lengths: list[int], counts: list[int], _: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], sum(counts), *x.shape[dim + 1 :])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dim, *_, lengths, counts, group = inputs
    ctx.how = dim, x.shape[dim], lengths, counts, group


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _backward_op(gradient, *ctx.how), *[None] * 6


def _run_backward(gradient: Tensor, dim: int, tokens: int, lengths: list[int], counts: list[int], group: int) -> Tensor:
    context: Any = group_of(group)
    ranks = len(lengths) // len(counts)
    tables = [tuple(lengths[first : first + ranks]) for first in range(0, len(lengths), ranks)]
    return gradient_of_slices(gradient, dim, context, tables, counts)


def _fake_backward(gradient: Tensor, dim: int, tokens: int, *_: Any) -> Tensor:
    return gradient.new_empty(*gradient.shape[:dim], tokens, *gradient.shape[dim + 1 :])


_backward_op = define_backward(
    "whole_of_backward",
    "(Tensor gradient, int dim, SymInt tokens, SymInt[] lengths, SymInt[] counts, SymInt group) -> Tensor",
    _run_backward,
    _fake_backward,
)
_op = register_autograd(
    define(
        "whole_of",
        "(Tensor x, int dim, str[] streams, bool keep, SymInt[] lengths, SymInt[] counts, SymInt group) -> Tensor",
        _run,
        _fake,
    ),
    _differentiate,
    _save,
)
