"""`qk_norm_rope` on CUDA: sources, see ``csrc/qk_*.cuh``; interface, see `HeadBackend`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda.head_kernels import HeadKernels, device_tuning, too_wide
from lightning_videoscale.kernels.cuda.launch import Kernel, address_of, load, rows_at
from lightning_videoscale.kernels.cuda.row_variant import TYPES
from lightning_videoscale.kernels.head_types import (
    HeadVariant,
    Rotation,
    Side,
    SideGradients,
    SideOutputs,
    as_rows,
)

_FINALIZE_LAYOUT = "PPii" * 2  # of a side two addresses, two sizes
_FINALIZE_BLOCK = (32, 32, 1)
_kernels = functools.cache(HeadKernels)


def limit(variant: HeadVariant, device: int) -> str | None:
    """See `HeadBackend.limit`."""
    if variant.activation not in TYPES:
        return f"tensors must be of {[*TYPES]}; got {variant.activation}"
    width, pairs = 16 // variant.activation.itemsize, variant.pairs
    lanes, distance = variant.head_dim // width, pairs // width
    if variant.head_dim % width or lanes > 32 or lanes & (lanes - 1):
        return f"Dh must be {width} times a power of two, at most {32 * width}; got {variant.head_dim}"
    if pairs % 4 or 2 * pairs % width:
        return f"rotated pairs must be a multiple of {max(4, width // 2)}; got {pairs}"
    if variant.op.layout != "interleaved" and (pairs % width or distance & (distance - 1)):
        return f"rotated pairs of layout half must be {width} times a power of two; got {pairs}"
    widest = variant._replace(direction="backward")  # so that it is the same for both
    return too_wide(widest) if device_tuning(widest, device) is None else None


def forward(
    variant: HeadVariant, sides: tuple[Side, Side], rotation: Rotation | None, eps: float
) -> tuple[SideOutputs, SideOutputs]:
    """See `HeadBackend.forward`."""
    return run_forward(_kernels(variant, sides[0].x.get_device()), sides, rotation, eps)


def run_forward(
    kernels: HeadKernels, sides: tuple[Side, Side], rotation: Rotation | None, eps: float
) -> tuple[SideOutputs, SideOutputs]:
    """Runs `forward` by these kernels."""
    op = kernels.variant.op
    outputs, structs, kept = [], [], []  # kept: what must live until the launch
    for side in map(_aligned, sides):
        x, rows = side.x, as_rows(side.x)
        shape = op.statistics_shape(x)
        mean = x.new_empty(shape, dtype=torch.float32) if op.norm == "layer" else None
        rstd = x.new_empty(shape, dtype=torch.float32) if op.norm != "none" and side.rstd is None else None
        y = x.new_empty(x.shape)
        structs.append(_side(rows, None, y, side, mean, rstd if side.rstd is None else side.rstd, None, None))
        outputs.append(SideOutputs(y, mean, rstd))
        kept += [rows, side]
    kernels(structs, rotation, kernels.blocks(_rows(sides)), eps)
    return outputs[0], outputs[1]


def backward(
    variant: HeadVariant,
    gradients: tuple[Tensor, Tensor],
    sides: tuple[Side, Side],
    rotation: Rotation | None,
    row_means: tuple[Tensor, Tensor] | None,
) -> tuple[SideGradients, SideGradients]:
    """See `HeadBackend.backward`."""
    return run_backward(_kernels(variant, sides[0].x.get_device()), gradients, sides, rotation, row_means)


def run_backward(
    kernels: HeadKernels,
    gradients: tuple[Tensor, Tensor],
    sides: tuple[Side, Side],
    rotation: Rotation | None,
    row_means: tuple[Tensor, Tensor] | None,
) -> tuple[SideGradients, SideGradients]:
    """Runs `backward` by these kernels."""
    blocks = kernels.blocks(_rows(sides))
    dxs, structs, kept, parts, dx_parts = [], [], [], [], []  # kept: what must live until the launch
    for i, (dy, side) in enumerate(zip(gradients, map(_aligned, sides), strict=True)):
        x, dy = as_rows(side.x), as_rows(dy)
        means = None if row_means is None else row_means[i].contiguous()
        dx = side.x.new_empty(side.x.shape)
        part = _new_parts(side, kernels.parts(blocks[i]))
        dx_part = x.new_empty((blocks[i], x.shape[1]), dtype=torch.float32) if kernels.variant.dx_sums else None
        structs.append(_side(x, dy, dx, side, side.mean, side.rstd, means, part, dx_part))
        dxs.append(dx)
        parts.append(part)
        dx_parts.append(dx_part)
        kept += [x, dy, means, side]
    kernels(structs, rotation, blocks, 0.0)
    q_parts, k_parts = dx_parts
    sums = [None, None] if q_parts is None or k_parts is None else _sums(q_parts, k_parts, torch.float32)
    q, k = (SideGradients(dx, *p, s) for dx, p, s in zip(dxs, _finalize(sides, parts), sums, strict=True))
    return q, k


def square_sums(variant: HeadVariant, xs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """See `HeadBackend.square_sums`."""
    kernels, sides = _kernels(variant, xs[0].get_device()), (Side(xs[0], None, None), Side(xs[1], None, None))
    rows = [as_rows(x) for x in xs]
    sums = [x.new_empty(x.shape[:2], dtype=torch.float32) for x in xs]
    structs = [
        _side(x, None, None, side, None, None, out, None) for x, side, out in zip(rows, sides, sums, strict=True)
    ]
    kernels(structs, None, kernels.blocks(_rows(sides)), 0.0)
    return sums[0], sums[1]


def gradient_sums(
    variant: HeadVariant, gradients: tuple[Tensor, Tensor], sides: tuple[Side, Side], rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    """See `HeadBackend.gradient_sums`."""
    kernels = _kernels(variant, sides[0].x.get_device())
    sides = (_aligned(sides[0]), _aligned(sides[1]))
    rows = [(as_rows(side.x), as_rows(dy)) for side, dy in zip(sides, gradients, strict=True)]
    sums = [side.x.new_empty(side.x.shape[:2], dtype=torch.float32) for side in sides]
    structs = [
        _side(x, dy, None, side, None, side.rstd, out, None)
        for (x, dy), side, out in zip(rows, sides, sums, strict=True)
    ]
    kernels(structs, rotation, kernels.blocks(_rows(sides)), 0.0)
    return sums[0], sums[1]


def _new_parts(side: Side, count: int) -> Tensor | None:
    """(count, parameters, columns) of float32 for the sums of weight and bias."""
    if side.weight is None:
        return None
    parameters = 1 if side.bias is None else 2
    return side.x.new_empty((count, parameters, side.weight.shape[0]), dtype=torch.float32)


def _finalize(sides: tuple[Side, Side], parts: list[Tensor | None]) -> list[tuple[Tensor | None, Tensor | None]]:
    q_parts, k_parts = parts
    q_weight = sides[0].weight
    if q_weight is None or q_parts is None or k_parts is None:
        return [(None, None), (None, None)]
    sums = _sums(q_parts, k_parts, q_weight.dtype)
    # An op's outputs must not share memory: the bias' is a tensor of its own.
    return [(total[0], None) if len(total) == 1 else (total[0].clone(), total[1].clone()) for total in sums]


def _sums(q_parts: Tensor, k_parts: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Adds each one's parts, (count, …) to (…), in one launch."""
    sums = [part.new_empty(part.shape[1:], dtype=dtype) for part in (q_parts, k_parts)]
    widths = [total.numel() for total in sums]
    _finalize_kernel(dtype, q_parts.get_device())(
        (sum(-(-width // _FINALIZE_BLOCK[0]) for width in widths), 1, 1),
        _FINALIZE_BLOCK,
        *(q_parts.data_ptr(), sums[0].data_ptr(), q_parts.shape[0], widths[0]),
        *(k_parts.data_ptr(), sums[1].data_ptr(), k_parts.shape[0], widths[1]),
    )
    return sums


@functools.cache
def _finalize_kernel(parameter: torch.dtype, device: int) -> Kernel:
    return load("qk_finalize.cuh", "qk_finalize", _FINALIZE_LAYOUT, {"PARAMETER": TYPES[parameter]}, device)


def _side(
    x: Tensor,
    dy: Tensor | None,
    out: Tensor | None,
    side: Side,
    mean: Tensor | None,
    rstd: Tensor | None,
    of_rows: Tensor | None,
    parts: Tensor | None,
    dx_parts: Tensor | None = None,
) -> tuple[int, ...]:
    """The members of the struct Side."""
    addresses = (address_of(t) for t in (out, side.weight, side.bias, mean, rstd, of_rows, parts, dx_parts))
    return (*rows_at(x), *rows_at(dy), *addresses, x.shape[0], side.x.shape[1])


def _aligned(side: Side) -> Side:
    """A side whose parameters begin on 16 bytes and whose statistics are contiguous, as the kernels read them."""
    weight, bias = (None if p is None else _at_16_bytes(p) for p in (side.weight, side.bias))
    mean, rstd = (None if t is None else t.contiguous() for t in (side.mean, side.rstd))
    if weight is side.weight and bias is side.bias and mean is side.mean and rstd is side.rstd:
        return side
    return side._replace(weight=weight, bias=bias, mean=mean, rstd=rstd)


def _at_16_bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 or not x.is_contiguous() else x


def _rows(sides: tuple[Side, Side]) -> tuple[int, int]:
    q, k = (side.x.shape[0] * side.x.shape[1] for side in sides)
    return q, k
