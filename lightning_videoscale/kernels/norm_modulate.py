"""LayerNorm and modulation in one op: y = (x̂ · weight + bias) · (1 + scale) + shift, with x̂ = (x - mean) · rstd.

Inside: `norm_modulate` (what one calls), the op ``lightning_videoscale::norm_modulate`` and its backward, which is an
op of its own, each with its plain PyTorch reference, the oracle of any faster implementation.

Shapes: B samples, S tokens, D channels; R stands for 1 (modulation per sample) or S (per token).
Rounding law "fp32_once": everything is computed in float32 (float64 if x is float64) and rounded once, to x's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FORWARD = "lightning_videoscale::norm_modulate"
_BACKWARD = "lightning_videoscale::norm_modulate_backward"


def norm_modulate(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """LayerNorm over the channels, then ``* (1 + scale) + shift``.

    Equals diffusers' ``(FP32LayerNorm(x.float()) * (1 + scale) + shift).type_as(x)`` to the bit when scale and shift
    are float32. Beside its inputs it keeps mean and rstd for backward: 8 bytes per token. Differentiable once; a second
    derivative raises.

    Args:
        x: (B, S, D), any floating dtype.
        scale: (B, 1, D) or (B, S, D), any floating dtype; usually float32.
        shift: Of the same shape and dtype as ``scale``.
        weight: (D,), the norm's own affine scale, or None for a norm without one.
        bias: Of the same shape and dtype as ``weight``; given exactly when that is.
        eps: Added to the variance.

    Returns:
        (B, S, D) in x's dtype, contiguous.

    Raises:
        ValueError: If shapes or dtypes do not fit, or only one of ``weight`` and ``bias`` is given.
    """
    _check_arguments(x, scale, shift, weight, bias)
    y: Tensor = torch.ops.lightning_videoscale.norm_modulate(x, scale, shift, weight, bias, eps)[0]
    return y


def _check_arguments(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.ndim != 3:
        raise ValueError(f"x must have shape (B, S, D); got {tuple(x.shape)}.")
    b, s, d = x.shape
    if scale.shape not in ((b, 1, d), (b, s, d)) or shift.shape != scale.shape:
        raise ValueError(
            f"scale and shift must both have shape {(b, 1, d)} (per sample) or {(b, s, d)} (per token) to fit x of "
            f"shape {(b, s, d)}; got {tuple(scale.shape)} and {tuple(shift.shape)}."
        )
    if scale.dtype != shift.dtype:
        raise ValueError(f"scale and shift must have one dtype; got {scale.dtype} and {shift.dtype}.")
    if weight is None and bias is None:
        return
    if weight is None or bias is None:
        raise ValueError("weight and bias must be given together, or neither.")
    if not weight.shape == bias.shape == (d,) or weight.dtype != bias.dtype:
        raise ValueError(
            f"weight and bias must both have shape {(d,)} and one dtype; "
            f"got {tuple(weight.shape)} {weight.dtype} and {tuple(bias.shape)} {bias.dtype}."
        )


def _wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.promote_types(x.dtype, torch.float32)


def _forward_reference(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide_dtype(x)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    normed, mean, rstd = torch.native_layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    y = normed * (1 + scale.to(wide)) + shift.to(wide)
    return y.to(x.dtype).contiguous(), mean, rstd


def _forward_fake(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = (*x.shape[:-1], 1)
    wide = _wide_dtype(x)
    return x.new_empty(x.shape), x.new_empty(statistics, dtype=wide), x.new_empty(statistics, dtype=wide)


def _backward_reference(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = mean.dtype
    dy = dy.to(wide)
    x_hat = (x.to(wide) - mean) * rstd
    normed = x_hat if weight is None or bias is None else x_hat * weight.to(wide) + bias.to(wide)
    dshift = _sum_like(dy, scale)
    dscale = _sum_like(dy * normed, scale)

    dnormed = dy * (1 + scale.to(wide))
    if weight is None:
        dweight, dbias = x.new_empty(0), x.new_empty(0)
        dx_hat = dnormed
    else:
        dweight = _sum_like(dnormed * x_hat, weight)
        dbias = _sum_like(dnormed, weight)
        dx_hat = dnormed * weight.to(wide)
    along_x_hat = (dx_hat * x_hat).mean(dim=-1, keepdim=True)
    dx = rstd * (dx_hat - dx_hat.mean(dim=-1, keepdim=True) - x_hat * along_x_hat)
    return dx.to(x.dtype).contiguous(), dscale, dshift, dweight, dbias


def _sum_like(x: Tensor, operand: Tensor) -> Tensor:
    """Sums over what was broadcast; always a new tensor, since an op's output must not be one of its inputs."""
    summed = x.sum_to_size(operand.shape)
    return summed.to(operand.dtype, copy=True, memory_format=torch.contiguous_format)


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    affine = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    modulation = scale.new_empty(scale.shape)
    return x.new_empty(x.shape), modulation, torch.empty_like(modulation), affine, torch.empty_like(affine)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, scale, _, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, scale, weight, bias, mean, rstd)


def _backward(ctx: Any, dy: Tensor, dmean: None, drstd: None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.lightning_videoscale.norm_modulate_backward(dy, *ctx.saved_tensors)
    return *(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad[:5], strict=True)), None


def _refuse_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "norm_modulate has no second derivative. If you need one (a gradient penalty, for example), leave this model "
        "without fused kernels."
    )


torch.library.define(
    _FORWARD,
    "(Tensor x, Tensor scale, Tensor shift, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
)
torch.library.define(
    _BACKWARD,
    "(Tensor dy, Tensor x, Tensor scale, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd)"
    " -> (Tensor dx, Tensor dscale, Tensor dshift, Tensor dweight, Tensor dbias)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward_reference)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward_reference)
torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
torch.library.register_autograd(_FORWARD, _backward, setup_context=_save_for_backward)
torch.library.register_autograd(_BACKWARD, _refuse_second_derivative)
