"""Norm and modulation in one op: y = (x̂ · weight + bias) · (1 + scale) + shift, with x̂ = (x - mean) · rstd.

Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from torch import Tensor

from lightning_videoscale.kernels import row_ops
from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.modulation import check_modulation
from lightning_videoscale.kernels.row_types import NORMS, ROUNDINGS, Norm, Rounding


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
    y: Tensor = row_ops.norm_modulate(
        x, None, None, scale, shift, weight, bias, None, scale_table, shift_table, None, index, eps, norm, "identity",
        False, rounding, backend,
    )[0]  # fmt: skip
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
