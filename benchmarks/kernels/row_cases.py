"""Row kernels as benchmarks run them: which there are, their inputs, what they must move, and how they are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda.row_kernels import RowKernels
from lightning_videoscale.kernels.cuda.row_variant import Direction
from lightning_videoscale.kernels.reference import rows as reference
from lightning_videoscale.kernels.row_types import Operand, RowInputs, RowMap, RowOp, RowVariant

OPERATIONS = {
    "norm_modulate": RowOp("layer"),
    "gate_residual_norm_modulate": RowOp("layer", residual=True, gate="identity"),
    "gate_residual": RowOp(None, residual=True, gate="identity"),
}
# Activations read or written per row, forward and backward.
PASSES = {"norm_modulate": (2, 3), "gate_residual_norm_modulate": (4, 6), "gate_residual": (3, 3)}
CHANNELS, LENGTHS = (5120, 3072, 1536), (8192, 16384, 32768, 65536)
GOALS = {1536: {8192: 0.6, 16384: 0.75, 32768: 0.8, 65536: 0.85}}
GOAL = {8192: 0.8, 16384: 0.9, 32768: 0.9, 65536: 0.9}


@dataclass(frozen=True)
class Case:
    """One kernel to tune: an operation's direction at one D, bf16 activations, float32 operands, one group."""

    operation: str
    direction: Direction
    channels: int

    @property
    def op(self) -> RowOp:
        return OPERATIONS[self.operation]

    @property
    def variant(self) -> RowVariant:
        has_dh = self.direction == "backward" and self.op.residual
        scale = self.op.norm is not None
        shift = scale and self.direction == "forward"
        bf16, branch = torch.bfloat16, torch.bfloat16 if self.op.residual else None
        return RowVariant(self.op, self.channels, bf16, branch, torch.float32, scale=scale, shift=shift, has_dh=has_dh)

    def bytes(self, n: int) -> int:
        """That must move: the activations, and the statistics."""
        passes = PASSES[self.operation][self.direction == "backward"]
        return passes * 2 * n * self.channels + (8 * n if self.op.norm else 0)

    def goal(self, n: int) -> float:
        return GOALS.get(self.channels, GOAL)[n]


class Data:
    """Random inputs of a case at N rows, and the gradients and statistics that its backward needs."""

    def __init__(self, case: Case, n: int) -> None:
        generator = torch.Generator("cuda").manual_seed(n + case.channels)

        def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

        d, op = case.channels, case.op
        self.case, self.rows = case, RowMap(1, n)
        self.x = draw(n, d)
        self.branch = draw(n, d) if op.residual else None
        self.gate = Operand(draw(1, d, dtype=torch.float32)) if op.gate else None
        self.scale = Operand(draw(1, d, dtype=torch.float32)) if op.norm else None
        self.shift = Operand(draw(1, d, dtype=torch.float32)) if op.norm else None
        backward = case.direction == "backward"
        self.dy = draw(n, d) if backward and op.norm else None
        self.dh = draw(n, d) if backward and op.residual else None
        self.mean = self.rstd = None
        if backward and op.norm:
            self.mean = self.x.float().mean(1)
            self.rstd = torch.rsqrt(self.x.float().var(1, unbiased=False) + 1e-6)

    def run(self, backend: Any, *kernels: RowKernels) -> tuple[Tensor | None, ...]:
        """Through a backend's functions, or through `run_forward` and `run_backward` with kernels."""
        variant, backward = self.case.variant, self.case.direction == "backward"
        operands = (self.gate, self.scale, None if backward else self.shift)
        inputs = RowInputs(self.x, self.branch, *operands, None, None, self.rows, 1e-6, self.mean, self.rstd)
        if not backward:
            return (backend.run_forward if kernels else backend.forward)(*kernels, variant, inputs)
        return (backend.run_backward if kernels else backend.backward)(*kernels, variant, inputs, self.dh, self.dy)

    def expected(self) -> tuple[Tensor | None, ...]:
        """In float64, of the same inputs."""
        wide = object.__new__(Data)
        for name, value in vars(self).items():
            if isinstance(value, Operand):
                value = Operand(value.values.double())
            setattr(wide, name, value.double() if isinstance(value, Tensor) else value)
        return wide.run(reference)


def largest_error(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> float:
    """Relative L2 error of the worst output; NaN counts as infinite."""
    worst = 0.0
    for mine, theirs in zip(got, expected, strict=True):
        if mine is None or theirs is None:
            continue
        error = ((mine.double() - theirs).norm() / theirs.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def poison(bytes_: int) -> None:
    """Fills memory that the allocator is about to hand out with NaN."""
    block = torch.full((bytes_ // 4,), float("nan"), device="cuda")
    del block


class Clock:
    """Times by events, with L2 flushed before each repeat.

    Args:
        held_back: Whether the device waits, at each repeat, until the host has enqueued everything.
    """

    def __init__(self, held_back: bool = False) -> None:
        self._held_back = held_back
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, run: Callable[[], object], repeats: int) -> float:
        """Microseconds, the median."""
        for _ in range(3):
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            self._flush.zero_()
            if self._held_back:
                torch.cuda._sleep(400_000)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in events)

    def copy(self, bytes_: int, repeats: int) -> float:
        """Microseconds of a copy that reads and writes ``bytes_`` together."""
        source = torch.randint(0, 255, (bytes_ // 2,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return self(lambda: target.copy_(source), repeats)
