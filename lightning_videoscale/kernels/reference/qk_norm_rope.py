"""`qk_norm_rope` in plain PyTorch: the oracle of every other backend, in float64 too."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.kernels.head_types import (
    HeadOp,
    HeadVariant,
    Rotation,
    Side,
    SideGradients,
    SideOutputs,
    wide_dtype,
)


def limit(variant: HeadVariant, device: int) -> str | None:
    """Returns None: the reference runs everything everywhere."""
    return None


def forward(
    variant: HeadVariant, sides: tuple[Side, Side], rotation: Rotation | None, eps: float
) -> tuple[SideOutputs, SideOutputs]:
    """See `HeadBackend.forward`."""
    q, k = sides
    return _forward(variant.op, q, rotation, eps), _forward(variant.op, k, rotation, eps)


def backward(
    variant: HeadVariant,
    gradients: tuple[Tensor, Tensor],
    sides: tuple[Side, Side],
    rotation: Rotation | None,
    row_means: tuple[Tensor, Tensor] | None,
) -> tuple[SideGradients, SideGradients]:
    """See `HeadBackend.backward`."""
    (dq, dk), (q, k), (q_means, k_means) = gradients, sides, row_means or (None, None)
    op, dx_sums = variant.op, variant.dx_sums
    return _backward(op, dq, q, rotation, q_means, dx_sums), _backward(op, dk, k, rotation, k_means, dx_sums)


def square_sums(variant: HeadVariant, xs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """See `HeadBackend.square_sums`."""
    q, k = (x.to(wide_dtype(x)).square().sum((-2, -1)) for x in xs)
    return q, k


def gradient_sums(
    variant: HeadVariant, gradients: tuple[Tensor, Tensor], sides: tuple[Side, Side], rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    """See `HeadBackend.gradient_sums`."""
    (dq, dk), (q, k) = gradients, sides
    return _gradient_sums(variant.op, dq, q, rotation), _gradient_sums(variant.op, dk, k, rotation)


def _forward(op: HeadOp, side: Side, rotation: Rotation | None, eps: float) -> SideOutputs:
    x = side.x.to(wide_dtype(side.x))
    mean: Tensor | None = None
    if op.norm == "layer":
        n, mean, rstd = _layer_normed(op, side, x, eps)
    else:
        rstd = _inverse_rms(op, side, x, eps)
        n = _x_hat(op, x, None, rstd)
        if op.round_x_hat:
            n = _round(n, side.x)
        if side.weight is not None:
            n = n * _per_channel(op, side.weight, x)
        if side.bias is not None:
            n = n + _per_channel(op, side.bias, x)
    if op.round_normed:
        n = _round(n, side.x)
    y = n if rotation is None else _rotate(op, n, rotation, rotation.sin)
    return SideOutputs(_as_input(y, side.x), mean, None if side.rstd is not None else rstd)


def _backward(
    op: HeadOp, dy: Tensor, side: Side, rotation: Rotation | None, row_means: Tensor | None, dx_sums: bool
) -> SideGradients:
    x = side.x.to(wide_dtype(side.x))
    dn = _unrotated(op, dy, x, rotation)
    if side.rstd is None:
        return SideGradients(_as_input(dn, side.x), None, None, dn.sum((0, 1)).flatten() if dx_sums else None)
    x_hat = _x_hat(op, x, side.mean, side.rstd)
    dweight = None if side.weight is None else _over_tokens(op, dn * x_hat, side.weight)
    dbias = None if side.bias is None else _over_tokens(op, dn, side.bias)

    dx_hat = dn if side.weight is None else dn * _per_channel(op, side.weight, x)
    along = _expand(op, row_means) if row_means is not None else (dx_hat * x_hat).mean(op.channels, keepdim=True)
    dx = dx_hat - x_hat * along
    if op.norm == "layer":
        dx = dx - dx_hat.mean(op.channels, keepdim=True)
    dx = dx * _expand(op, side.rstd)
    return SideGradients(_as_input(dx, side.x), dweight, dbias, dx.sum((0, 1)).flatten() if dx_sums else None)


def _gradient_sums(op: HeadOp, dy: Tensor, side: Side, rotation: Rotation | None) -> Tensor:
    x = side.x.to(wide_dtype(side.x))
    dx_hat = _unrotated(op, dy, x, rotation)
    if side.weight is not None:
        dx_hat = dx_hat * _per_channel(op, side.weight, x)
    return (dx_hat * _x_hat(op, x, None, side.rstd)).sum((-2, -1))


def _layer_normed(op: HeadOp, side: Side, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """By PyTorch's own function, whose bits are not those of its formula."""
    rows = x if op.per_head else x.flatten(-2)
    weight, bias = (None if p is None else p.to(x.dtype) for p in (side.weight, side.bias))
    n, mean, rstd = torch.native_layer_norm(rows, rows.shape[-1:], weight, bias, eps)
    return n.view_as(x), mean.squeeze(-1), rstd.squeeze(-1)


def _inverse_rms(op: HeadOp, side: Side, x: Tensor, eps: float) -> Tensor | None:
    if op.norm == "none" or side.rstd is not None:
        return side.rstd
    rows = x if op.per_head else x.flatten(-2)
    return torch.rsqrt(rows.square().mean(-1) + eps)


def _x_hat(op: HeadOp, x: Tensor, mean: Tensor | None, rstd: Tensor | None) -> Tensor:
    if mean is not None:
        x = x - _expand(op, mean)
    return x if rstd is None else x * _expand(op, rstd)


def _rotate(op: HeadOp, x: Tensor, rotation: Rotation, sin: Tensor) -> Tensor:
    pairs, rotated_tokens = rotation.cos.shape[-1], rotation.cos.shape[1]
    y = x.clone()
    part = y.narrow(1, rotation.start, rotated_tokens).narrow(-1, 0, 2 * pairs)
    sizes, between = ((pairs, 2), -1) if op.layout == "interleaved" else ((2, pairs), -2)
    a, b = part.unflatten(-1, sizes).unbind(between)
    cos = rotation.cos
    if op.layout == "half_fma":
        turned = [torch.addcmul(a * cos, -sin, b), torch.addcmul(b * cos, sin, a)]
    else:
        turned = [a * cos - b * sin, a * sin + b * cos]
    part.copy_(torch.stack(turned, dim=between).flatten(-2))
    return y


def _unrotated(op: HeadOp, dy: Tensor, x: Tensor, rotation: Rotation | None) -> Tensor:
    dy = dy.to(x.dtype)
    return dy if rotation is None else _rotate(op, dy, rotation, -rotation.sin)


def _expand(op: HeadOp, statistics: Tensor) -> Tensor:
    """(B, S[, H]) as (B, S, H or 1, 1)."""
    return statistics.unsqueeze(-1) if op.per_head else statistics[..., None, None]


def _per_channel(op: HeadOp, parameter: Tensor, x: Tensor) -> Tensor:
    """(Dh,) or (D,) as what multiplies (B, S, H, Dh)."""
    return parameter.to(x.dtype) if op.per_head else parameter.to(x.dtype).view(x.shape[-2:])


def _over_tokens(op: HeadOp, gradient: Tensor, parameter: Tensor) -> Tensor:
    summed = gradient.sum((0, 1, 2) if op.per_head else (0, 1)).flatten()
    return summed.to(parameter.dtype)


def _round(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype).to(value.dtype)


def _as_input(dx: Tensor, x: Tensor) -> Tensor:
    """A new contiguous tensor: an op's output must not be one of its inputs."""
    return dx.to(x.dtype, memory_format=torch.contiguous_format, copy=True)
