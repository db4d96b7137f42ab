"""One compiled variant of `qk_norm_rope`: the constants that make it, and how it is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda.head_tuning import Direction, Tuning, tuning_for
from lightning_videoscale.kernels.cuda.launch import Kernel, load
from lightning_videoscale.kernels.head_types import HeadOp, Rotation

TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# Layouts of the kernels' arguments: of a side two sources (address, bytes between rows), eight addresses, two sizes; of
# the tables two addresses, four strides, two sizes.
_SIDE, _ROPE = "PqPqPPPPPPPPii", "PPqqqqii"
_LAYOUTS = {"forward": f"{_SIDE * 2}{_ROPE}fi", "backward": f"{_SIDE * 2}{_ROPE}i"}


class Variant(NamedTuple):
    """Everything a kernel is specialised on.

    Attributes:
        op: The variant of the operation.
        direction: Forward or backward.
        activation: Dtype of x, y and their gradients.
        parameter: Dtype of weight and bias, or None without.
        bias: Whether there is a bias.
        heads: Of q and of k.
        head_dim: Dh.
        pairs: Rotated pairs per head; 0 rotates nothing.
        table_heads: Whether the tables differ by head.
        pair_stride: Floats from pair to pair in the tables, 1 or 2.
        phases: Floats before the first pair in a row of cos and of sin, that begins on 16 bytes.
        outside: Whether rstd (forward) or the rows' means (backward) come from outside.
        sums_only: Whether a row's sum is all that leaves.
        dx_sums: Whether backward leaves parts of the sum of dx over all rows.
    """

    op: HeadOp
    direction: Direction
    activation: torch.dtype
    parameter: torch.dtype | None
    bias: bool
    heads: tuple[int, int]
    head_dim: int
    pairs: int
    table_heads: bool
    pair_stride: int = 1
    phases: tuple[int, int] = (0, 0)
    outside: bool = False
    sums_only: bool = False
    dx_sums: bool = False

    def constants(self) -> dict[str, str | int]:
        """Returns the macros of ``csrc/qk_config.cuh``."""
        return {
            "ACTIVATION": TYPES[self.activation],
            "PARAMETER": TYPES[self.parameter or self.activation],
            "Q_HEADS": self.heads[0],
            "K_HEADS": self.heads[1],
            "HEAD_DIM": self.head_dim,
            "NORM": {"none": 0, "layer": 1, "rms": 2}[self.op.norm],
            "PER_HEAD": int(self.op.per_head),
            "HALF": int(self.op.layout == "half"),
            "PAIRS": self.pairs,
            "TABLE_HEADS": int(self.table_heads),
            "PAIR_STRIDE": self.pair_stride,
            "COS_PHASE": self.phases[0],
            "SIN_PHASE": self.phases[1],
            "ROUND_X_HAT": int(self.op.round_x_hat),
            "ROUND_NORMED": int(self.op.round_normed),
            "WEIGHT": int(self.parameter is not None),
            "BIAS": int(self.bias),
            "GIVEN": int(self.outside),
            "SUMS_ONLY": int(self.sums_only),
            "DX_SUMS": int(self.dx_sums),
        }

    @property
    def vectors(self) -> int:
        """16-byte vectors in the wider side's row."""
        return max(self.heads) * self.head_dim * self.activation.itemsize // 16

    @property
    def together(self) -> bool:
        """Whether a block takes a token's q and k at once."""
        return self.direction == "forward" and self.pairs > 0 and self.heads[0] == self.heads[1]

    @property
    def stage_bytes(self) -> int:
        """Of one row of every input and its tables, on the wider side."""
        backward = self.direction == "backward" and self.op.norm != "none"
        tables = 2 * 4 * self.pairs * self.pair_stride * (max(self.heads) if self.table_heads else 1)
        return (2 if backward or self.together else 1) * 16 * self.vectors + tables


class Plan:
    """One variant, compiled, and how it is launched. Make it once per variant.

    Args:
        variant: The variant.
        device: Index of the CUDA device.
        tuning: By default what `tuning_for` says.
    """

    def __init__(self, variant: Variant, device: int, tuning: Tuning | None = None) -> None:
        tuning = tuning or device_tuning(variant, device)
        if tuning is None:
            raise NotImplementedError(too_wide(variant))
        self.tuning = tuning
        self.variant = variant
        name = f"qk_{variant.direction}"
        self.kernel: Kernel = load(
            f"{name}.cuh",
            name,
            _LAYOUTS[variant.direction],
            variant.constants() | tuning.constants(),
            device,
            shared_bytes=tuning.stages * variant.stage_bytes,
        )
        self._most_blocks = tuning.blocks * torch.cuda.get_device_properties(device).multi_processor_count

    def blocks(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Blocks for q and for k, in proportion to their channels; those for both count as q's."""
        if self.variant.together:
            return min(rows[0], self._most_blocks), 0
        work = [n * heads for n, heads in zip(rows, self.variant.heads, strict=True)]
        if not work[1]:
            return min(rows[0], self._most_blocks), 0
        if not work[0]:
            return 0, min(rows[1], self._most_blocks)
        q_blocks = min(max(1, round(self._most_blocks * work[0] / sum(work))), self._most_blocks - 1)
        return min(rows[0], q_blocks), min(rows[1], self._most_blocks - q_blocks)

    def parts(self, blocks: int) -> int:
        """Parts that so many blocks of a backward leave."""
        if not self.variant.op.per_head:
            return blocks
        return blocks * (self.tuning.threads * 16 // (self.variant.head_dim * self.variant.activation.itemsize))

    def __call__(
        self, sides: list[tuple[int, ...]], rotation: Rotation | None, blocks: tuple[int, int], eps: float
    ) -> None:
        """Launches; a side is the members of the struct Side."""
        scalars = (eps, blocks[0]) if self.variant.direction == "forward" else (blocks[0],)
        self.kernel((sum(blocks), 1, 1), (self.tuning.threads, 1, 1), *sides[0], *sides[1], *_rope(rotation), *scalars)


def device_tuning(variant: Variant, device: int) -> Tuning | None:
    """How a variant is launched on a device; None where it cannot be."""
    # Beside the ring a block keeps its barriers and the scratch of its sums.
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024  # type: ignore[attr-defined]
    return tuning_for(variant.direction, variant.together, variant.vectors, variant.stage_bytes, limit)


def too_wide(variant: Variant) -> str:
    """Says why a variant has no tuning."""
    return f"two rows of every input and their tables ({2 * variant.stage_bytes} bytes) must fit in shared memory"


def readable(rotation: Rotation | None) -> Rotation | None:
    """A rotation whose tables the kernels can read: as they are where a token's row is whole words of 16 bytes."""
    if rotation is None or _are_readable(rotation):
        return rotation
    cos, sin = (t.clone(memory_format=torch.contiguous_format) for t in (rotation.cos, rotation.sin))
    return Rotation(cos, sin, rotation.start)


def table_layout(rotation: Rotation) -> tuple[int, tuple[int, int]]:
    """Of `readable` tables: floats from pair to pair, and between 16 bytes and the first pair, of cos and of sin."""
    if not _are_readable(rotation):
        return 1, (0, 0)
    return rotation.cos.stride(3), (rotation.cos.data_ptr() % 16 // 4, rotation.sin.data_ptr() % 16 // 4)


def _are_readable(rotation: Rotation) -> bool:
    alike = rotation.cos.stride(3) == rotation.sin.stride(3)
    return alike and _is_readable(rotation.cos) and _is_readable(rotation.sin)


def _is_readable(table: Tensor) -> bool:
    sample, token, head, pair = table.stride()
    packed = table.shape[2] == 1 or head == table.shape[3] * pair
    return pair in (1, 2) and packed and sample % 4 == token % 4 == 0 and table.data_ptr() % 16 < 4 * pair


def _rope(rotation: Rotation | None) -> tuple[int, ...]:
    """The members of the struct Rope."""
    if rotation is None:
        return (0,) * 8
    cos, sin = rotation.cos, rotation.sin
    several = cos.shape[0] > 1
    strides = (t.stride(dim) if dim or several else 0 for t in (cos, sin) for dim in (0, 1))
    return (cos.data_ptr() & -16, sin.data_ptr() & -16, *strides, rotation.start, cos.shape[1])
