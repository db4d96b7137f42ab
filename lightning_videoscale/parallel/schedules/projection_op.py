"""`projecting` as an op for compiled code, see `ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.autograd import register_autograd
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads
from lightning_videoscale.parallel.schedules.messages import heads_first
from lightning_videoscale.parallel.schedules.ops import PLACE, define, define_backward, ulysses_of
from lightning_videoscale.parallel.schedules.projecting import ProjectionCall, kept, project_and_send, send_gradients

_GIVEN = (
    "Tensor x, Tensor? q_weight, Tensor? q_bias, Tensor? k_weight, Tensor? k_bias, Tensor? v_weight, Tensor? v_bias,"
    " Tensor? q, Tensor? k, Tensor? v, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin"
)
_KEPT = (
    "Tensor x, Tensor? q_weight, Tensor? k_weight, Tensor? v_weight, Tensor? q_norm, Tensor? k_norm, Tensor? cos,"
    " Tensor? sin, Tensor[] before_norm"
)
_HOW = f"int width, float eps, str rounding, str backend, str layout, bool by_slices, {PLACE}"
_TENSORS, _WITH_GRADIENT = 14, 12


def numbers_of(norm: NormAcrossHeads | None) -> tuple[Any, ...]:
    """Returns a norm as the op takes it."""
    return (0, 0.0, "", "", "") if norm is None else (norm.width, norm.eps, norm.rounding, norm.backend, norm.layout)


def _call_of(arguments: Sequence[Any]) -> ProjectionCall:
    norm, (by_slices, *place) = arguments[:5], arguments[5:]
    return ProjectionCall(ulysses_of(*place), NormAcrossHeads(*norm) if norm[0] else None, place[1], by_slices)


def _run(*arguments: Any) -> list[Tensor]:
    return list(project_and_send(_call_of(arguments[_TENSORS:]), *arguments[:_TENSORS]))


def _fake(*arguments: Any) -> list[Tensor]:
    x, weight, result = arguments[0], arguments[1], arguments[7]
    width, *_, lengths, heads, mine, _, _ = arguments[_TENSORS:]
    batch, dim = x.shape[0], (weight.shape[0] if result is None else result.shape[2]) // heads
    rows = [x.new_empty(sum(lengths) * batch, mine, dim) for _ in range(5 if width else 3)]
    wide = torch.promote_types(x.dtype, torch.float32)
    rstds = [x.new_empty(2, 1, sum(lengths) * batch, dtype=wide)] if width else []
    return [*(heads_first(each, batch) for each in rows[:3]), *rows[3:], *rstds]


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: list[Tensor]) -> None:
    tensors, ctx.how = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.save_for_backward(*kept(tensors, outputs[3:]))
    ctx.mark_non_differentiable(*outputs[3:])


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    saved, needs = ctx.saved_tensors, list(ctx.needs_input_grad)
    there = iter(_backward_op(*gradients[:3], *saved[:8], list(saved[8:]), needs[:_WITH_GRADIENT], *ctx.how))
    return *(next(there) if each else None for each in _returned(saved, needs)), *[None] * (len(needs) - _WITH_GRADIENT)


def _returned(saved: Sequence[Tensor | None], needs: Sequence[bool]) -> list[bool]:
    """Which gradients there are; of an input that no weight multiplies, there is none."""
    return [needs[0] and any(weight is not None for weight in saved[1:4]), *needs[1:_WITH_GRADIENT]]


def _run_backward(*arguments: Any) -> list[Tensor]:
    saved, needs, how = [*arguments[3:11], *arguments[11]], arguments[12], arguments[13:]
    return [g for g in send_gradients(_call_of(how), arguments[:3], saved, needs) if g is not None]


def _fake_backward(dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, *arguments: Any) -> list[Tensor]:
    weights, norms, needs, heads = arguments[:3], arguments[3:5], arguments[8], arguments[-4]
    bias, result = (x.new_empty(*shape, heads * dq.shape[3]) for shape in ((), x.shape[:2]))
    of_parameters = [like for weight in weights for like in (weight, bias)]
    like = [x, *of_parameters, result, result, result, *norms]
    there = zip(like, _returned([x, *weights], needs), strict=True)
    return [each.new_empty(each.shape) for each, is_there in there if is_there]


_backward_op = define_backward(
    "project_heads_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, {_KEPT}, bool[] needs, {_HOW}) -> Tensor[]",
    _run_backward,
    _fake_backward,
    returns_list=True,
)
project_heads_op = register_autograd(
    define("project_heads", f"({_GIVEN}, {_HOW}) -> Tensor[]", _run, _fake), _differentiate, _save, returns_list=True
)
