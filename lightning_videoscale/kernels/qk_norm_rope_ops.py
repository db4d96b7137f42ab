"""The ``torch.library`` ops beneath `qk_norm_rope`, which see q and k as (B, S, H, Dh) and arguments already checked.

- `forward`: y of q and k, and the statistics that were computed; given q_rstd and k_rstd it uses those instead.
- `backward`: the gradients of q, k, their weights and biases, and of their projections' biases; given q_row_means and
  k_row_means it uses those instead of its own sums over the row.
- `square_sums` and `gradient_sums`: what those come from where a row's heads are spread over ranks.

What a variant lacks is an empty tensor, so that every op returns the same number of tensors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lightning_videoscale.kernels.autograd import refuse_second_derivative, register_autograd
from lightning_videoscale.kernels.backend import first_able
from lightning_videoscale.kernels.head_types import HeadBackend, HeadOp, Layout, Rotation, Side, wide_dtype
from lightning_videoscale.kernels.row_ops import bias_gradient, contiguous, fake_bias_gradient

_NAMES = ("qk_norm_rope", "qk_norm_rope_backward", "qk_square_sums", "qk_gradient_sums")
_FORWARD, _BACKWARD, _SQUARE_SUMS, _GRADIENT_SUMS = (f"lightning_videoscale::{name}" for name in _NAMES)
_VARIANT = "str norm, bool per_head, str layout, int start, bool round_x_hat, bool round_normed, str backend"
_AFFINE = "Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias"
_STATISTICS = "Tensor q_mean, Tensor k_mean, Tensor q_rstd, Tensor k_rstd"


def _forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    q_proj_bias: Tensor | None,
    k_proj_bias: Tensor | None,
    eps: float,
    norm: Any,
    per_head: bool,
    layout: Layout,
    start: int,
    round_x_hat: bool,
    round_normed: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    op, rotation = HeadOp(norm, per_head, layout, round_x_hat, round_normed), _rotation(cos, sin, start)
    sides = (
        Side(q, contiguous(q_weight), contiguous(q_bias), rstd=q_rstd),
        Side(k, contiguous(k_weight), contiguous(k_bias), rstd=k_rstd),
    )
    return _paired(_choose(backend, op, sides, rotation).forward(op, sides, rotation, eps), wide_dtype(q))


def _forward_fake(
    q: Tensor, k: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    q_rstd, norm, per_head = rest[6], rest[11], rest[12]
    op = HeadOp(norm, per_head, "half", False)

    def statistics(exist: bool) -> list[Tensor]:
        return [x.new_empty(op.statistics_shape(x) if exist else (0,), dtype=wide_dtype(x)) for x in (q, k)]

    means, rstds = statistics(norm == "layer"), statistics(norm != "none" and q_rstd is None)
    return q.new_empty(q.shape), k.new_empty(k.shape), *means, *rstds


def _backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_mean: Tensor,
    k_mean: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    q_row_means: Tensor | None,
    k_row_means: Tensor | None,
    norm: Any,
    per_head: bool,
    layout: Layout,
    start: int,
    round_x_hat: bool,
    round_normed: bool,
    backend: str,
    q_bias_dtype: torch.dtype | None,
    k_bias_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    op, rotation = HeadOp(norm, per_head, layout, round_x_hat, round_normed), _rotation(cos, sin, start)
    sides = _side(op, q, q_weight, q_bias, q_mean, q_rstd), _side(op, k, k_weight, k_bias, k_mean, k_rstd)
    row_means = None if q_row_means is None or k_row_means is None else (q_row_means, k_row_means)
    dx_sums = q_bias_dtype is not None or k_bias_dtype is not None
    run = _choose(backend, op, sides, rotation).backward
    of_q, of_k = run(op, (dq.to(q.dtype), dk.to(q.dtype)), sides, rotation, row_means, dx_sums=dx_sums)
    gradients = _paired((of_q[:3], of_k[:3]), q.dtype)
    return *gradients, bias_gradient(of_q.dx_sum, q_bias_dtype, q), bias_gradient(of_k.dx_sum, k_bias_dtype, q)


def _backward_fake(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    affine = (q.new_empty(0) if p is None else p.new_empty(p.shape) for p in (q_weight, k_weight, q_bias, k_bias))
    widths = zip((q, k), rest[-2:], strict=True)
    sums = (fake_bias_gradient(x.shape[2] * x.shape[3], dtype, q) for x, dtype in widths)
    return q.new_empty(q.shape), k.new_empty(k.shape), *affine, *sums


def _square_sums(q: Tensor, k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    op, sides = HeadOp("rms", False, "half", False), (Side(q, None, None), Side(k, None, None))
    return _choose(backend, op, sides, None).square_sums((q, k))


def _gradient_sums(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    layout: Layout,
    start: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    op, rotation = HeadOp("rms", False, layout, False), _rotation(cos, sin, start)
    sides = Side(q, contiguous(q_weight), None, rstd=q_rstd), Side(k, contiguous(k_weight), None, rstd=k_rstd)
    return _choose(backend, op, sides, rotation).gradient_sums(op, (dq.to(q.dtype), dk.to(q.dtype)), sides, rotation)


def _gradient_sums_fake(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _square_sums_fake(q, k, "")


def _square_sums_fake(q: Tensor, k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[:2], dtype=wide_dtype(q)), k.new_empty(k.shape[:2], dtype=wide_dtype(k))


def _choose(backend: str, op: HeadOp, sides: tuple[Side, Side], rotation: Rotation | None) -> HeadBackend:
    chosen = first_able(
        backend, "qk_norm_rope", "qk_norm_rope", sides[0].x.is_cuda, lambda b: b.objection(op, sides, rotation)
    )
    return cast(HeadBackend, chosen)


def _rotation(cos: Tensor | None, sin: Tensor | None, start: int) -> Rotation | None:
    return None if cos is None or sin is None else Rotation(cos, sin, start)


def _side(op: HeadOp, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Side:
    weight, bias = contiguous(weight), contiguous(bias)  # backends read the values in a row
    return Side(x, weight, bias, mean if op.norm == "layer" else None, None if op.norm == "none" else rstd)


def _paired(sides: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(q's first, k's first, q's second, …), with an empty tensor for None."""
    like = sides[0][0]
    return tuple(like.new_empty(0, dtype=dtype) if t is None else t for pair in zip(*sides, strict=True) for t in pair)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if inputs[8] is not None:
        raise NotImplementedError(
            "With rstd from outside, the gradient of qk_norm_rope needs an exchange: use qk_norm_rope_sharded."
        )
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:8], *output[2:])
    ctx.variant = inputs[13:]
    needed = zip(inputs[10:12], ctx.needs_input_grad[10:12], strict=True)
    ctx.bias_dtypes = [bias.dtype if needs else None for bias, needs in needed]


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, *statistics: None) -> tuple[Tensor | None, ...]:
    gradients = backward(dq, dk, *ctx.saved_tensors, None, None, *ctx.variant, *ctx.bias_dtypes)
    needed = ctx.needs_input_grad
    wanted = zip(gradients, (*needed[:6], *needed[10:12]), strict=True)
    *of_inputs, q_proj_bias, k_proj_bias = (g if needs else None for g, needs in wanted)
    return *of_inputs, None, None, None, None, q_proj_bias, k_proj_bias, *(None,) * (len(needed) - 12)


def _refuse_derivative(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError("Sums over a row have no gradient of their own: qk_norm_rope_sharded exchanges them.")


torch.library.define(
    _FORWARD,
    f"(Tensor q, Tensor k, {_AFFINE}, Tensor? cos, Tensor? sin, Tensor? q_rstd, Tensor? k_rstd,"
    f" Tensor? q_proj_bias, Tensor? k_proj_bias, float eps, {_VARIANT})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _BACKWARD,
    f"(Tensor dq, Tensor dk, Tensor q, Tensor k, {_AFFINE}, Tensor? cos, Tensor? sin, {_STATISTICS},"
    f" Tensor? q_row_means, Tensor? k_row_means, {_VARIANT}, ScalarType? q_bias_dtype, ScalarType? k_bias_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(_SQUARE_SUMS, "(Tensor q, Tensor k, str backend) -> (Tensor, Tensor)")
torch.library.define(
    _GRADIENT_SUMS,
    "(Tensor dq, Tensor dk, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin,"
    " Tensor q_rstd, Tensor k_rstd, str layout, int start, str backend) -> (Tensor, Tensor)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)
torch.library.impl(_SQUARE_SUMS, "CompositeExplicitAutograd", _square_sums)
torch.library.impl(_GRADIENT_SUMS, "CompositeExplicitAutograd", _gradient_sums)
torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
torch.library.register_fake(_SQUARE_SUMS, _square_sums_fake)
torch.library.register_fake(_GRADIENT_SUMS, _gradient_sums_fake)
forward = register_autograd(_FORWARD, _differentiate, _save_for_backward)
backward = refuse_second_derivative(_BACKWARD, "qk_norm_rope")
square_sums, gradient_sums = (
    register_autograd(name, _refuse_derivative, lambda ctx, inputs, output: None)
    for name in (_SQUARE_SUMS, _GRADIENT_SUMS)
)
