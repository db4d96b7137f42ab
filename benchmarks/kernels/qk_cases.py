"""Problems of qk_norm_rope, and what each must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda import qk_norm_rope as cuda
from lightning_videoscale.kernels.cuda.head_kernels import HeadKernels
from lightning_videoscale.kernels.cuda.row_variant import Direction
from lightning_videoscale.kernels.head_types import HeadOp, HeadVariant, Rotation, Side, variant_of
from lightning_videoscale.kernels.reference import qk_norm_rope as reference


@dataclass(frozen=True)
class Problem:
    """One variant at one size.

    Attributes:
        op: The variant.
        heads: Of q and of k.
        head_dim: Dh.
        n: Tokens.
        table_heads: Whether every head has cos and sin of its own.
    """

    op: HeadOp
    heads: int
    head_dim: int
    n: int
    table_heads: bool = False

    def data(self) -> tuple[tuple[Side, Side], Rotation, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        shape = (1, self.n, self.heads, self.head_dim)
        columns = self.head_dim if self.op.per_head else self.heads * self.head_dim

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

        layer = self.op.norm == "layer"
        q, k = (Side(draw(*shape), draw(columns), draw(columns) if layer else None) for _ in range(2))
        of_heads = self.heads if self.table_heads else 1
        angle = torch.randn(1, self.n, of_heads, self.head_dim // 2, device="cuda").repeat_interleave(2, -1)
        # Tables with one entry per channel, of which diffusers' Wan reads these.
        rotation = Rotation(angle.cos()[..., 0::2], angle.sin()[..., 1::2], 0)
        return (q, k), rotation, (draw(*shape), draw(*shape))

    def bytes(self, direction: Direction) -> int:
        """To move: q, k (and their gradients) in and out, cos and sin once per pair, backward's statistics."""
        rows = (4 if direction == "forward" else 6) * 2 * self.heads * self.head_dim
        statistics_ = 8 * (self.heads if self.op.per_head else 1) if direction == "backward" else 0
        tables = 4 * self.head_dim * (self.heads if self.table_heads else 1)
        return self.n * (rows + tables + statistics_)

    def variant(self, direction: Direction, sides: tuple[Side, Side], rotation: Rotation) -> HeadVariant:
        return variant_of(self.op, direction, sides, rotation)


def with_statistics(problem: Problem, sides: tuple[Side, Side], rotation: Rotation) -> tuple[Side, Side]:
    outputs = cuda.forward(problem.variant("forward", sides, rotation), sides, rotation, 1e-6)
    q, k = (Side(s.x, s.weight, s.bias, o.mean, o.rstd) for s, o in zip(sides, outputs, strict=True))
    return q, k


def runner(problem: Problem, direction: Direction, kernels: HeadKernels | None) -> Callable[[], list[Tensor]]:
    """What is timed: one direction, by these kernels if there are any."""
    sides, rotation, gradients = problem.data()
    if direction == "backward":
        sides = with_statistics(problem, sides, rotation)
    variant = problem.variant(direction, sides, rotation)

    def run() -> list[Tensor]:
        results: Any
        if direction == "forward" and kernels is not None:
            results = cuda.run_forward(kernels, sides, rotation, 1e-6)
        elif direction == "forward":
            results = cuda.forward(variant, sides, rotation, 1e-6)
        elif kernels is not None:
            results = cuda.run_backward(kernels, gradients, sides, rotation, None)
        else:
            results = cuda.backward(variant, gradients, sides, rotation, None)
        return [tensor for side in results for tensor in side if tensor is not None]

    return run


def exact(problem: Problem, direction: Direction) -> list[Tensor]:
    """The same in float64."""
    sides, rotation, gradients = problem.data()
    q, k = (
        Side(s.x.double(), None if s.weight is None else s.weight.double(), None if s.bias is None else s.bias.double())
        for s in sides
    )
    wide = Rotation(rotation.cos.double(), rotation.sin.double(), rotation.start)
    variant = problem.variant(direction, (q, k), wide)
    outputs = reference.forward(variant, (q, k), wide, 1e-6)
    results: Any = outputs
    if direction == "backward":
        given = tuple(Side(s.x, s.weight, s.bias, o.mean, o.rstd) for s, o in zip((q, k), outputs, strict=True))
        results = reference.backward(variant, tuple(g.double() for g in gradients), given, wide, None)  # type: ignore[arg-type]
    return [tensor for side in results for tensor in side if tensor is not None]


def largest_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Of all tensors, relative in the L2 norm; NaN counts as infinite."""
    errors = [float((g.double() - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)]
    return max(error if error == error else float("inf") for error in errors)
