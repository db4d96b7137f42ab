"""The ``torch.library`` ops beneath `qk_norm_rope`, which see q and k as (B, S, H, Dh) and arguments already checked.

- `forward`: y of q and k, and the statistics that were computed; given q_rstd and k_rstd it uses those instead.
- `backward`: the gradients of q, k, their weights and biases, and of their projections' biases; given q_row_means and
  k_row_means it uses those instead of its own sums over the row.
- `square_sums` and `gradient_sums`: what those come from where a row's heads are spread over ranks.

Statistics that a variant lacks are empty tensors; `backward` returns a list of the gradients that there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lightning_videoscale.kernels.autograd import (
    NAMESPACE,
    define_op,
    refuse_derivative,
    refuse_second_derivative,
    register_autograd,
)
from lightning_videoscale.kernels.backend import choose
from lightning_videoscale.kernels.head_types import (
    HeadBackend,
    HeadNorm,
    HeadOp,
    HeadVariant,
    RopeLayout,
    Rotation,
    Side,
    variant_of,
    wide_dtype,
)
from lightning_videoscale.kernels.modulation import contiguous, in_dtype

_NAMES = ("qk_norm_rope", "qk_norm_rope_backward", "qk_square_sums", "qk_gradient_sums")
_FORWARD, _BACKWARD, _SQUARE_SUMS, _GRADIENT_SUMS = (f"{NAMESPACE}::{name}" for name in _NAMES)
_VARIANT = "str norm, bool per_head, str layout, int start, bool round_x_hat, bool round_normed, str backend"
_AFFINE = "Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias"
_STATISTICS = "Tensor q_mean, Tensor k_mean, Tensor q_rstd, Tensor k_rstd"


class Settings(NamedTuple):
    """What every op of a call has in common; see `HeadOp` and `Rotation`."""

    norm: HeadNorm
    per_head: bool
    layout: RopeLayout
    start: int
    round_x_hat: bool
    round_normed: bool
    backend: str

    @property
    def op(self) -> HeadOp:
        """The variant."""
        return HeadOp(self.norm, self.per_head, self.layout, self.round_x_hat, self.round_normed)


class HeadCall(NamedTuple):
    """The tensors of a forward, in the order of its schema; rotations' tables as `Rotation` has them.

    The biases of the projections are not read; their gradients are those of q and k, summed over all rows.
    """

    q: Tensor
    k: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_rstd: Tensor | None = None
    k_rstd: Tensor | None = None
    q_proj_bias: Tensor | None = None
    k_proj_bias: Tensor | None = None


class HeadBackwardCall(NamedTuple):
    """The tensors of a backward, in the order of its schema; statistics are empty where the variant has none."""

    dq: Tensor
    dk: Tensor
    q: Tensor
    k: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    q_mean: Tensor
    k_mean: Tensor
    q_rstd: Tensor
    k_rstd: Tensor
    q_row_means: Tensor | None = None
    k_row_means: Tensor | None = None

    def sides(self, op: HeadOp) -> tuple[Side, Side]:
        """Q and k with what belongs to them."""
        q_mean, k_mean = (self.q_mean, self.k_mean) if op.norm == "layer" else (None, None)
        q_rstd, k_rstd = (None, None) if op.norm == "none" else (self.q_rstd, self.k_rstd)
        q = Side(self.q, contiguous(self.q_weight), contiguous(self.q_bias), q_mean, q_rstd)
        return q, Side(self.k, contiguous(self.k_weight), contiguous(self.k_bias), k_mean, k_rstd)


_TENSORS, _BACKWARD_TENSORS = len(HeadCall._fields), len(HeadBackwardCall._fields)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call, eps, settings = HeadCall(*arguments[:_TENSORS]), arguments[_TENSORS], Settings(*arguments[_TENSORS + 1 :])
    op, rotation = settings.op, _rotation(call.cos, call.sin, settings.start)
    sides = (
        Side(call.q, contiguous(call.q_weight), contiguous(call.q_bias), rstd=call.q_rstd),
        Side(call.k, contiguous(call.k_weight), contiguous(call.k_bias), rstd=call.k_rstd),
    )
    variant = variant_of(op, "forward", sides, rotation, outside=call.q_rstd is not None)
    q, k = _backend(settings.backend, variant, call.q).forward(variant, sides, rotation, eps)
    statistics = (q.mean, k.mean, q.rstd, k.rstd)
    return q.y, k.y, *(call.q.new_empty(0, dtype=wide_dtype(call.q)) if t is None else t for t in statistics)


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, settings = HeadCall(*arguments[:_TENSORS]), Settings(*arguments[_TENSORS + 1 :])

    def statistics(exist: bool) -> list[Tensor]:
        shapes = [settings.op.statistics_shape(x) if exist else (0,) for x in (call.q, call.k)]
        return [call.q.new_empty(shape, dtype=wide_dtype(call.q)) for shape in shapes]

    means, rstds = statistics(settings.norm == "layer"), statistics(settings.norm != "none" and call.q_rstd is None)
    return call.q.new_empty(call.q.shape), call.k.new_empty(call.k.shape), *means, *rstds


def _backward(*arguments: Any) -> list[Tensor]:
    """dq, dk; the gradients of weights and biases that there are; of the projections' biases that have a dtype here."""
    call = HeadBackwardCall(*arguments[:_BACKWARD_TENSORS])
    settings, bias_dtypes = Settings(*arguments[_BACKWARD_TENSORS:-2]), arguments[-2:]
    op, rotation = settings.op, _rotation(call.cos, call.sin, settings.start)
    sides = call.sides(op)
    row_means = None if call.q_row_means is None or call.k_row_means is None else (call.q_row_means, call.k_row_means)
    dx_sums = any(dtype is not None for dtype in bias_dtypes)
    variant = variant_of(op, "backward", sides, rotation, outside=row_means is not None, dx_sums=dx_sums)
    dys = in_dtype(call.dq, call.q.dtype), in_dtype(call.dk, call.q.dtype)
    q, k = _backend(settings.backend, variant, call.q).backward(variant, dys, sides, rotation, row_means)
    gradients = [t for t in (q.dx, k.dx, q.dweight, k.dweight, q.dbias, k.dbias) if t is not None]
    sums = zip((q.dx_sum, k.dx_sum), bias_dtypes, strict=True)
    return gradients + [in_dtype(total, dtype) for total, dtype in sums if total is not None and dtype is not None]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    call, bias_dtypes = HeadBackwardCall(*arguments[:_BACKWARD_TENSORS]), arguments[-2:]
    like = (call.q, call.k, call.q_weight, call.k_weight, call.q_bias, call.k_bias)
    widths = (x.shape[2] * x.shape[3] for x in (call.q, call.k))
    sums = [call.q.new_empty(w, dtype=d) for w, d in zip(widths, bias_dtypes, strict=True) if d is not None]
    return [t.new_empty(t.shape) for t in like if t is not None] + sums


def _square_sums(q: Tensor, k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    op, sides = HeadOp("rms", False, "half", False), (Side(q, None, None), Side(k, None, None))
    variant = variant_of(op, "forward", sides, None, sums_only=True)
    return _backend(backend, variant, q).square_sums(variant, (q, k))


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
    layout: RopeLayout,
    start: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    op, rotation = HeadOp("rms", False, layout, False), _rotation(cos, sin, start)
    sides = Side(q, contiguous(q_weight), None, rstd=q_rstd), Side(k, contiguous(k_weight), None, rstd=k_rstd)
    variant = variant_of(op, "backward", sides, rotation, sums_only=True)
    dys = in_dtype(dq, q.dtype), in_dtype(dk, q.dtype)
    return _backend(backend, variant, q).gradient_sums(variant, dys, sides, rotation)


def _gradient_sums_fake(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _square_sums_fake(q, k, "")


def _square_sums_fake(q: Tensor, k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[:2], dtype=wide_dtype(q)), k.new_empty(k.shape[:2], dtype=wide_dtype(k))


def _backend(backend: str, variant: HeadVariant, q: Tensor) -> HeadBackend:
    module: HeadBackend = choose("heads", backend, "qk_norm_rope", variant, q.get_device())
    return module


def _rotation(cos: Tensor | None, sin: Tensor | None, start: int) -> Rotation | None:
    return None if cos is None or sin is None else Rotation(cos, sin, start)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = HeadCall(*inputs[:_TENSORS])
    if call.q_rstd is not None:
        raise NotImplementedError(
            "With rstd from outside, the gradient needs sums of other ranks: call gradient_sums and backward."
        )
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*call[:8], *output[2:])
    ctx.settings = inputs[_TENSORS + 1 :]
    needed = zip((call.q_proj_bias, call.k_proj_bias), ctx.needs_input_grad[10:12], strict=True)
    ctx.bias_dtypes = [bias.dtype if bias is not None and needs else None for bias, needs in needed]


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, *statistics: None) -> tuple[Tensor | None, ...]:
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad
    gradients = iter(backward(dq, dk, *saved, None, None, *ctx.settings, *ctx.bias_dtypes))
    of_inputs = [None if t is None else next(gradients) for t in saved[:6]]
    of_biases = [None if dtype is None else next(gradients) for dtype in ctx.bias_dtypes]
    wanted = (g if needs else None for g, needs in zip(of_inputs, needed[:6], strict=True))
    return *wanted, None, None, None, None, *of_biases, *(None,) * (len(needed) - _TENSORS)


define_op(
    _FORWARD,
    f"(Tensor q, Tensor k, {_AFFINE}, Tensor? cos, Tensor? sin, Tensor? q_rstd, Tensor? k_rstd,"
    f" Tensor? q_proj_bias, Tensor? k_proj_bias, float eps, {_VARIANT})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
define_op(
    _BACKWARD,
    f"(Tensor dq, Tensor dk, Tensor q, Tensor k, {_AFFINE}, Tensor? cos, Tensor? sin, {_STATISTICS},"
    f" Tensor? q_row_means, Tensor? k_row_means, {_VARIANT}, ScalarType? q_bias_dtype, ScalarType? k_bias_dtype)"
    " -> Tensor[]",
    _backward,
    _backward_fake,
)
define_op(_SQUARE_SUMS, "(Tensor q, Tensor k, str backend) -> (Tensor, Tensor)", _square_sums, _square_sums_fake)
define_op(
    _GRADIENT_SUMS,
    "(Tensor dq, Tensor dk, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin,"
    " Tensor q_rstd, Tensor k_rstd, str layout, int start, str backend) -> (Tensor, Tensor)",
    _gradient_sums,
    _gradient_sums_fake,
)
forward = register_autograd(_FORWARD, _differentiate, _save_for_backward)
backward = refuse_second_derivative(_BACKWARD, "qk_norm_rope")
square_sums, gradient_sums = (
    refuse_derivative(name, "Sums over a row have no gradient of their own: who exchanges them has.")
    for name in (_SQUARE_SUMS, _GRADIENT_SUMS)
)
