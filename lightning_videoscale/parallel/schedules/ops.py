"""What the ops of schedules share, by which compiled code exchanges.

A compiler sees an op, and none of the matrix products and messages inside: these run in the order of eager code. Ops
take tensors and plain values only, such as the number of a group of ranks. Compilers may not reorder them. Ranks must
exchange in one order, and a compiler may choose one by the sizes of tensors, which differ between ranks.

`PLACE`, `place_of`, `ulysses_of`   a Ulysses group in a layer, as the last arguments of an op
`define`, `define_backward`         make an op
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_videoscale.compat.torch.compilation import keep_order
from lightning_videoscale.kernels.autograd import NAMESPACE, define_op, refuse_derivative
from lightning_videoscale.parallel.group_numbers import group_of
from lightning_videoscale.parallel.schedules.messages import SECOND_DERIVATIVE
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads

PLACE = "SymInt[] lengths, int heads, int mine, SymInt tokens, SymInt group"
"""Tokens of each rank of the Ulysses group, heads of the layer and of this rank, its tokens, and the group's number."""


def place_of(ulysses: Ulysses) -> tuple[list[int], int, int, int, int]:
    """Returns a Ulysses group in a layer as an op takes it."""
    shares = ulysses.heads.out
    assert ulysses.number is not None
    mine = shares.mine[0]
    return [size // mine for size in shares.by_tokens], shares.heads[0][-1].stop, mine, shares.tokens, ulysses.number


def ulysses_of(lengths: Sequence[int], heads: int, mine: int, tokens: int, number: int) -> Ulysses:
    """The inverse of `place_of`."""
    group, lengths = group_of(number), tuple(lengths)
    axis = group.mesh.ulysses
    return Ulysses(axis, assign_heads(axis.rank, lengths, lengths, heads, heads), group.transport, number)


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Makes an op that computes as eager code does and keeps its place in the program; returns its full name."""

    def without_autocast(first: Any, *arguments: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return run(first, *arguments)

    full = f"{NAMESPACE}::{name}"
    define_op(full, schema, without_autocast, fake)
    keep_order(full)
    return full


def define_backward(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, returns_list: bool = False
) -> Callable[..., Any]:
    """As `define`, for a backward, which has no derivative; returns the op."""
    return refuse_derivative(define(name, schema, run, fake), SECOND_DERIVATIVE, returns_list=returns_list)
