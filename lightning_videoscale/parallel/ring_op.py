"""`ring` as an op for compiled code of split models, see `schedules.ops`.

Traced, the ring's backward begins with an exchange of keys and values that waits for no gradient. By the sizes of its
messages a compiler decides whether that is the one of forward, is moved there or stays, and ranks may differ in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_videoscale.attention.op import backward_fake, chooser, forward_fake
from lightning_videoscale.compat.torch.attention import tokens_first
from lightning_videoscale.kernels.autograd import refuse_derivative, register_autograd
from lightning_videoscale.parallel.group_numbers import group_of
from lightning_videoscale.parallel.ring import SECOND_DERIVATIVE, Ring, attend_to_blocks, gradients_of_blocks
from lightning_videoscale.parallel.schedules.ops import define


def ring_attention_by_op(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, mask: Tensor | None, number: int
) -> Tensor:
    """As `ring.ring_attention`, with the number of the group that has the ring."""
    how = ring.scale, list(ring.repeats), ring.choices.number, list(ring.lengths), number
    out: Tensor = _op(query, key, value, mask, *how)[0]
    return out


def _ring(scale: float, repeats: Sequence[int], chooser_number: int, lengths: Sequence[int], number: int) -> Ring:
    group, choices = group_of(number), chooser(chooser_number)
    return Ring(group.mesh.ring, tuple(lengths), tuple(repeats), scale, group.transport, choices)


def _run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    out, lse = attend_to_blocks(query, key, value, mask, _ring(*how))
    return tokens_first(out), lse.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.how = inputs
    ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(query, key, value, mask, *outputs)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward_op(gradient, *ctx.saved_tensors, *ctx.how), *[None] * 6


def _run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, mask, out, lse, *how = arguments
    dq, dk, dv = gradients_of_blocks(gradient, query, key, value, mask, out, lse, _ring(*how))
    return tokens_first(dq), tokens_first(dk.clone()), tokens_first(dv.clone())  # which are of one message


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask"
_HOW = "float scale, int[] repeats, SymInt chooser, SymInt[] lengths, SymInt group"

_backward_op = refuse_derivative(
    define(
        "ring_attention_backward",
        f"(Tensor gradient, {_GIVEN}, Tensor out, Tensor lse, {_HOW}) -> (Tensor, Tensor, Tensor)",
        _run_backward,
        backward_fake,
    ),
    SECOND_DERIVATIVE,
)
_op = register_autograd(
    define("ring_attention", f"({_GIVEN}, {_HOW}) -> (Tensor, Tensor)", _run, forward_fake), _differentiate, _save
)
