"""`qk_norm_rope` in Triton: the launches of `qk_norm_rope_kernels`; interface, see `HeadBackend`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lightning_videoscale.kernels.head_types import (
    HeadOp,
    HeadVariant,
    Rotation,
    Side,
    SideGradients,
    SideOutputs,
    as_rows,
)
from lightning_videoscale.kernels.triton.launch import on_device_of, run_kernel
from lightning_videoscale.kernels.triton.qk_norm_rope_kernels import backward_kernel, forward_kernel, square_sums_kernel

_TILE = 2048  # channels that a program holds at once, where heads are independent


def limit(variant: HeadVariant, device: int) -> str | None:
    """See `HeadBackend.limit`."""
    if variant.activation not in (torch.float32, torch.bfloat16, torch.float16):
        return f"Triton's kernels take float32, bfloat16 and float16, not {variant.activation}"
    if variant.head_dim % 2:
        return f"Triton's kernels take channels by twos, hence an even Dh; got {variant.head_dim}"
    return None


def forward(
    variant: HeadVariant, sides: tuple[Side, Side], rotation: Rotation | None, eps: float
) -> tuple[SideOutputs, SideOutputs]:
    """See `HeadBackend.forward`."""
    op, given = variant.op, sides[0].rstd is not None
    outputs, arguments = [], []
    for side in sides:
        x = side.x
        statistics = op.statistics_shape(x)
        mean = x.new_empty(statistics, dtype=torch.float32) if op.norm == "layer" else None
        rstd = x.new_empty(statistics, dtype=torch.float32) if op.norm != "none" and not given else None
        y = x.new_empty(x.shape)
        rows = as_rows(x)
        read_or_written = side.rstd if given else rstd
        arguments.append((rows, y, side.weight, side.bias, mean, read_or_written, rows.stride(0), *_extent(x)))
        outputs.append(SideOutputs(y, mean, rstd))
    _launch(
        forward_kernel,
        op,
        sides,
        rotation,
        arguments,
        (eps,),
        GIVEN=given,
        ROUND=op.round_x_hat,
        ROUND_NORMED=op.round_normed,
    )
    return outputs[0], outputs[1]


def backward(
    variant: HeadVariant,
    gradients: tuple[Tensor, Tensor],
    sides: tuple[Side, Side],
    rotation: Rotation | None,
    row_means: tuple[Tensor, Tensor] | None,
) -> tuple[SideGradients, SideGradients]:
    """See `HeadBackend.backward`."""
    op, dx_sums = variant.op, variant.dx_sums
    partials = [
        [*(_partials(op, side, p) for p in (side.weight, side.bias)), _dx_partials(op, side.x) if dx_sums else None]
        for side in sides
    ]
    outputs = [side.x.new_empty(side.x.shape) for side in sides]
    arguments = [
        _backward_arguments(dy, side, dx, means, *sums)
        for dy, side, dx, means, sums in zip(
            gradients, sides, outputs, row_means or (None, None), partials, strict=True
        )
    ]
    _launch(
        backward_kernel, op, sides, rotation, arguments, (),
        GIVEN=row_means is not None, SUMS_ONLY=False, DX_SUMS=dx_sums,
    )  # fmt: skip
    q, k = (
        SideGradients(
            dx, _total(dweight, side.weight), _total(dbias, side.bias), None if dx_sum is None else dx_sum.sum(0)
        )
        for dx, (dweight, dbias, dx_sum), side in zip(outputs, partials, sides, strict=True)
    )
    return q, k


def square_sums(variant: HeadVariant, xs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """See `HeadBackend.square_sums`."""
    sums = []
    for x in xs:
        rows = as_rows(x)
        out = x.new_empty(x.shape[:2], dtype=torch.float32)
        if rows.shape[0]:
            block = triton.next_power_of_2(rows.shape[1])
            with on_device_of(x):
                run_kernel(
                    square_sums_kernel, (rows.shape[0],),
                    rows, out, rows.stride(0), rows.shape[1], block, num_warps=_warps(block),
                )  # fmt: skip
        sums.append(out)
    return sums[0], sums[1]


def gradient_sums(
    variant: HeadVariant, gradients: tuple[Tensor, Tensor], sides: tuple[Side, Side], rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    """See `HeadBackend.gradient_sums`."""
    sums = [side.x.new_empty(side.x.shape[:2], dtype=torch.float32) for side in sides]
    arguments = [
        _backward_arguments(dy, side, None, out, None, None, None)
        for dy, side, out in zip(gradients, sides, sums, strict=True)
    ]
    _launch(backward_kernel, variant.op, sides, rotation, arguments, (), GIVEN=False, SUMS_ONLY=True, DX_SUMS=False)
    return sums[0], sums[1]


def _backward_arguments(
    dy: Tensor, side: Side, dx: Tensor | None, row_means: Tensor | None, *partials: Tensor | None
) -> tuple[Any, ...]:
    dy, x = as_rows(dy), as_rows(side.x)
    means = None if row_means is None else row_means.contiguous()
    return (
        dy, x, dx, side.weight, side.mean, side.rstd, means, *partials, dy.stride(0), x.stride(0), *_extent(side.x),
    )  # fmt: skip


def _launch(
    kernel: Any,
    op: HeadOp,
    sides: tuple[Side, Side],
    rotation: Rotation | None,
    arguments: list[tuple[Any, ...]],
    scalars: tuple[float, ...],
    **variant: bool,
) -> None:
    q, k = (side.x for side in sides)
    blocks = [_heads_at_once(op, x) for x in (q, k)]
    channels = triton.next_power_of_2(q.shape[3])
    programs = [_programs(op, x, kernel is forward_kernel) for x in (q, k)]
    pairs, table_heads = (0, 1) if rotation is None else (rotation.cos.shape[3], rotation.cos.shape[2])
    if not sum(programs):
        return
    with on_device_of(q):
        run_kernel(
            kernel, (sum(programs),),
            *arguments, _table(rotation), *scalars, programs[0], q.shape[2], k.shape[2], q.shape[3],
            pairs, *blocks, channels, NORM=op.norm, PER_HEAD=op.per_head,
            HALF=pairs > 0 and op.layout != "interleaved", TABLE_HEADS=table_heads > 1,
            AFFINE=sides[0].weight is not None, BIAS=sides[0].bias is not None, **variant,
            num_warps=_warps(max(blocks) * channels),
            # Eager code rounds a · cos and b · sin before it adds them.
            enable_fp_fusion=False,
        )  # fmt: skip


def _table(rotation: Rotation | None) -> tuple[Any, ...]:
    if rotation is None:
        return (None, None, *(0,) * 10)
    cos, sin = rotation.cos, rotation.sin
    several = cos.shape[0] > 1
    strides = (t.stride(dim) if dim or several else 0 for t in (cos, sin) for dim in range(4))
    return (cos, sin, *strides, rotation.start, cos.shape[1])


def _extent(x: Tensor) -> tuple[int, int]:
    """Rows, and tokens per sample."""
    return x.shape[0] * x.shape[1], x.shape[1]


def _heads_at_once(op: HeadOp, x: Tensor) -> int:
    every: int = triton.next_power_of_2(x.shape[2])
    return (
        min(every, max(1, _TILE // triton.next_power_of_2(x.shape[3]))) if op.per_head or op.norm == "none" else every
    )


def _programs(op: HeadOp, x: Tensor, forward: bool) -> int:
    """Enough for loads to be on their way while others are worked on; few in backward, where each leaves sums.

    A multiple of the parts that a row has, hence each program has the same part of all its rows.
    """
    heads = _heads_at_once(op, x)
    parts: int = triton.cdiv(x.shape[2], heads)
    units: int = x.shape[0] * x.shape[1] * parts
    warps = _warps(heads * triton.next_power_of_2(x.shape[3]))
    of_multiprocessor = 16 if forward else max(4, 16 // warps)
    most = of_multiprocessor * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    return min(units, max(1, most // parts) * parts)


def _dx_partials(op: HeadOp, x: Tensor) -> Tensor:
    """Room for what programs add up of dx: a row for as many of them as a row has parts."""
    rows = _programs(op, x, forward=False) // triton.cdiv(x.shape[2], _heads_at_once(op, x))
    return x.new_empty((rows, x.shape[2] * x.shape[3]), dtype=torch.float32)


def _partials(op: HeadOp, side: Side, parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.new_empty((_programs(op, side.x, forward=False), *parameter.shape), dtype=torch.float32)


def _total(partials: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if partials is None or parameter is None else partials.sum(0).to(parameter.dtype)


def _warps(tile: int) -> int:
    return min(16, max(2, tile // 1024))
