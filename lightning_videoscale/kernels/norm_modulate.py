"""Norm and modulation in one op: y = (x̂ · weight + bias) · (1 + scale) + shift, with x̂ = (x - mean) · rstd.

Inside: `norm_modulate` (what one calls), the op ``lightning_videoscale::norm_modulate`` and its backward, an op of its
own. Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.autograd import refuse_second_derivative, register_autograd
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.modulation import check_modulation
from lightning_videoscale.kernels.row_ops import (
    NAMESPACE,
    Operands,
    empty,
    fake_gradient,
    if_needed,
    none_where_unneeded,
    run_backward,
    run_forward,
)
from lightning_videoscale.kernels.row_types import NORMS, ROUNDINGS, Norm, Rounding, RowOp

_FORWARD = f"{NAMESPACE}::norm_modulate"
_BACKWARD = f"{NAMESPACE}::norm_modulate_backward"


def norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Norm = "layer",
    eps: float = 1e-6,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    rounding: Rounding = "fp32_once",
    backend: BackendName = "auto",
) -> Tensor:
    """LayerNorm or RMSNorm over the channels, then ``* (1 + scale) + shift``.

    With "fp32_once", LayerNorm and float32 scale and shift it equals diffusers'
    ``(FP32LayerNorm(x.float()) * (1 + scale) + shift).type_as(x)``, on the reference backend to the bit. Beside its
    inputs it keeps mean and rstd for backward: 8 bytes per token, 4 for RMSNorm. Differentiable once; a second
    derivative raises. Autocast leaves it as it is: y has x's dtype.

    Args:
        x: (B, S, D), any floating dtype.
        scale: (B, R, D) with R dividing S, an entry for each S / R consecutive tokens (R = 1 per sample, S per token),
            or with an index (G, D); any floating dtype, usually float32; at any stride, such as a chunk of
            (B, R, 6, D). None for the norm alone.
        shift: Of the same shape and dtype as ``scale``; None for a scale alone.
        weight: (D,), the norm's own affine scale, or None for a norm without one.
        bias: Of the same shape and dtype as ``weight``; a LayerNorm has it exactly when it has that, a RMSNorm never.
        norm: "layer" or "rms".
        eps: Added to the variance, or to the mean square.
        scale_table: (D,), added to every entry of ``scale`` inside; a block's own part of the modulation. Any dtype.
        shift_table: Likewise to ``shift``, of the same dtype.
        index: (B, R) integers in [0, G), R dividing S: which entry belongs to each S / R consecutive tokens.
        rounding: "fp32_once": everything in float32 (float64 if x is float64), rounded once, to x's dtype. "eager":
            rounded to x's dtype after every operation, as PyTorch does with modules in that dtype.
        backend: "auto", or "cuda", "triton" or "reference", which then runs or raises.

    Returns:
        (B, S, D) in x's dtype, contiguous.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit, a norm's or operand's parts do not belong together, or a
            setting has no such value.
        NotImplementedError: If the backend asked for by name cannot run this.
    """
    check_norm_modulate(x, scale, shift, weight, bias, norm, scale_table, shift_table, index, rounding)
    y: Tensor = _op(x, scale, shift, weight, bias, eps, scale_table, shift_table, index, norm, rounding, backend)[0]
    return y


def check_norm_modulate(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    index: Tensor | None,
    rounding: Rounding,
) -> None:
    """Checks what `norm_modulate` is called with.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit, a norm's or operand's parts do not belong together, or a
            setting has no such value.
    """
    check_tensors(
        x=x, scale=scale, shift=shift, weight=weight, bias=bias, scale_table=scale_table, shift_table=shift_table
    )
    check_choice("rounding", rounding, ROUNDINGS)
    if x.ndim != 3:
        raise ValueError(f"x must have shape (B, S, D); got {tuple(x.shape)}.")
    check_modulation(x, {"scale": scale, "shift": shift}, {"scale": scale_table, "shift": shift_table}, index)
    check_norm(x, norm, scale, shift, weight, bias)


def check_norm(
    x: Tensor, norm: Norm, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Checks the parts of a norm and of its modulation that belong together.

    Raises:
        ValueError: If they do not.
    """
    d = x.shape[-1]
    check_choice("norm", norm, NORMS)
    if shift is not None and scale is None:
        raise ValueError("A shift needs a scale beside it; give a scale of zeros where there is none.")
    if norm == "rms" and bias is not None:
        raise ValueError("A RMSNorm has no bias; leave it out.")
    if norm == "layer" and (weight is None) != (bias is None):
        raise ValueError("weight and bias must be given together, or neither.")
    affine = [p for p in (weight, bias) if p is not None]
    if any(p.shape != (d,) or p.dtype != affine[0].dtype for p in affine):
        raise ValueError(
            f"weight and bias must both have shape {(d,)} and one dtype; "
            f"got {' and '.join(f'{tuple(p.shape)} {p.dtype}' for p in affine)}."
        )


def _forward(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    index: Tensor | None,
    norm: Norm,
    rounding: Rounding,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    op = RowOp(norm=norm, rounding=rounding)
    operands = Operands(scale=scale, shift=shift, scale_table=scale_table, shift_table=shift_table, index=index)
    _, y, mean, rstd = run_forward("norm_modulate", backend, op, x, None, operands, weight, bias, eps)
    assert y is not None and rstd is not None
    return y, empty(rstd) if mean is None else mean, rstd


def fake_statistics(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Returns mean and rstd in their shapes; an empty mean for a RMSNorm."""
    rstd = x.new_empty(x.shape[0] * x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(rstd) if norm == "layer" else empty(rstd), rstd


def _forward_fake(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, norm, _, _ = arguments
    return x.new_empty(x.shape), *fake_statistics(x, norm)


def _backward(
    dh: Tensor | None,
    dy: Tensor,
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    index: Tensor | None,
    norm: Norm,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """dh: What reaches x from elsewhere (`fork_norm_modulate`), added before dx is rounded."""
    op = RowOp(norm=norm, sums=any(needs))
    operands = Operands(scale=scale, scale_table=scale_table, shift_table=shift_table, index=index)
    gradients = run_backward(
        "norm_modulate", backend, op, dh, dy, x, None, operands, weight, bias,
        mean if norm == "layer" else None, rstd, eps=0.0,
    )  # fmt: skip
    assert gradients.dx is not None
    parameters = (
        gradients.dscale, gradients.dshift, gradients.dweight, gradients.dbias, gradients.dscale_table,
        gradients.dshift_table,
    )  # fmt: skip
    return gradients.dx, *(if_needed(g, n, rstd) for g, n in zip(parameters, needs, strict=True))


def _backward_fake(
    dh: Tensor | None,
    dy: Tensor,
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    index: Tensor | None,
    norm: Norm,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    parameters = (scale, scale, weight, bias, scale_table, shift_table)
    return x.new_empty(x.shape), *(fake_gradient(p, n, rstd) for p, n in zip(parameters, needs, strict=True))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, scale, _, weight, bias, _, scale_table, shift_table, index, norm, _, backend = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, scale, weight, bias, mean, rstd, scale_table, shift_table, index)
    ctx.norm, ctx.backend = norm, backend


def _differentiate(ctx: Any, dy: Tensor | None, dmean: None, drstd: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 12
    needs_x, *affine_and_modulation = ctx.needs_input_grad[:5]
    needs = [*affine_and_modulation, *ctx.needs_input_grad[6:8]]
    dx, *gradients = _backward_op(None, dy, *ctx.saved_tensors, ctx.norm, ctx.backend, needs)
    dscale, dshift, dweight, dbias, dscale_table, dshift_table = none_where_unneeded(gradients, needs)
    return (
        dx if needs_x else None, dscale, dshift, dweight, dbias, None, dscale_table, dshift_table, None, None, None,
        None,
    )  # fmt: skip


torch.library.define(
    _FORWARD,
    "(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, Tensor? scale_table,"
    " Tensor? shift_table, Tensor? index, str norm, str rounding, str backend)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
)
torch.library.define(
    _BACKWARD,
    "(Tensor? dh, Tensor dy, Tensor x, Tensor? scale, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " Tensor? scale_table, Tensor? shift_table, Tensor? index, str norm, str backend, bool[] needs)"
    " -> (Tensor dx, Tensor dscale, Tensor dshift, Tensor dweight, Tensor dbias, Tensor dscale_table,"
    " Tensor dshift_table)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)
torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
_op = register_autograd(_FORWARD, _differentiate, _save_for_backward)
_backward_op = refuse_second_derivative(_BACKWARD, "norm_modulate")
