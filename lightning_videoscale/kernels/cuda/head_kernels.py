"""One compiled variant of `qk_norm_rope`: the constants that make it, and how it is launched."""

from __future__ import annotations

import torch

from lightning_videoscale.kernels.cuda.head_tuning import HeadTuning, tuning_for
from lightning_videoscale.kernels.cuda.launch import Kernel, load
from lightning_videoscale.kernels.cuda.row_variant import TYPES
from lightning_videoscale.kernels.head_types import HeadVariant, Rotation

# Layouts of the kernels' arguments: of a side two sources (address, bytes between rows), eight addresses, two sizes; of
# the tables two addresses, four strides, two sizes.
_SIDE, _ROPE = "PqPqPPPPPPPPii", "PPqqqqii"
_LAYOUTS = {"forward": f"{_SIDE * 2}{_ROPE}fi", "backward": f"{_SIDE * 2}{_ROPE}i"}


def constants(variant: HeadVariant) -> dict[str, str | int]:
    """Returns the macros of ``csrc/qk_config.cuh``."""
    return {
        "ACTIVATION": TYPES[variant.activation],
        "PARAMETER": TYPES[variant.parameter or variant.activation],
        "Q_HEADS": variant.heads[0],
        "K_HEADS": variant.heads[1],
        "HEAD_DIM": variant.head_dim,
        "NORM": {"none": 0, "layer": 1, "rms": 2}[variant.op.norm],
        "PER_HEAD": int(variant.op.per_head),
        "HALF": int(variant.op.layout != "interleaved"),
        "PAIRS": variant.pairs,
        "TABLE_HEADS": int(variant.table_heads),
        "PAIR_STRIDE": variant.pair_stride,
        "COS_PHASE": variant.phases[0],
        "SIN_PHASE": variant.phases[1],
        "ROUND_X_HAT": int(variant.op.round_x_hat),
        "ROUND_NORMED": int(variant.op.round_normed),
        "WEIGHT": int(variant.parameter is not None),
        "BIAS": int(variant.bias),
        "GIVEN": int(variant.outside),
        "SUMS_ONLY": int(variant.sums_only),
        "DX_SUMS": int(variant.dx_sums),
    }


def vectors(variant: HeadVariant) -> int:
    """16-byte vectors in the wider side's row."""
    return max(variant.heads) * variant.head_dim * variant.activation.itemsize // 16


def together(variant: HeadVariant) -> bool:
    """Whether a block takes a token's q and k at once."""
    return variant.direction == "forward" and variant.pairs > 0 and variant.heads[0] == variant.heads[1]


def stage_bytes(variant: HeadVariant) -> int:
    """Of one row of every input and its tables, on the wider side."""
    two = together(variant) or (variant.direction == "backward" and variant.op.norm != "none")
    tables = 2 * 4 * variant.pairs * variant.pair_stride * (max(variant.heads) if variant.table_heads else 1)
    return (2 if two else 1) * 16 * vectors(variant) + tables


class HeadKernels:
    """One variant, compiled, and how it is launched. Make it once per variant."""

    def __init__(self, variant: HeadVariant, device: int, tuning: HeadTuning | None = None) -> None:
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
            constants(variant) | tuning.constants(),
            device,
            shared_bytes=tuning.stages * stage_bytes(variant),
        )
        self._most_blocks = tuning.blocks * torch.cuda.get_device_properties(device).multi_processor_count

    def blocks(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Blocks for q and for k, in proportion to their channels; those for both count as q's."""
        if max(rows) > 2**30:
            raise NotImplementedError(f"At most 2³⁰ tokens; got {rows[0]} of q and {rows[1]} of k.")
        if together(self.variant):
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
        rotation = None if rotation is None else rotation.readable()
        scalars = (eps, blocks[0]) if self.variant.direction == "forward" else (blocks[0],)
        self.kernel((sum(blocks), 1, 1), (self.tuning.threads, 1, 1), *sides[0], *sides[1], *_rope(rotation), *scalars)


def device_tuning(variant: HeadVariant, device: int) -> HeadTuning | None:
    """How a variant is launched on a device; None where it cannot be."""
    # Beside the ring a block keeps its barriers and the scratch of its sums.
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024  # type: ignore[attr-defined]
    row = vectors(variant), variant.table_heads, stage_bytes(variant)
    return tuning_for(variant.direction, together(variant), *row, limit)


def too_wide(variant: HeadVariant) -> str:
    """Says why a variant has no tuning."""
    return f"two rows of every input and their tables ({2 * stage_bytes(variant)} bytes) must fit in shared memory"


def _rope(rotation: Rotation | None) -> tuple[int, ...]:
    """The members of the struct Rope."""
    if rotation is None:
        return (0,) * 8
    cos, sin = rotation.cos, rotation.sin
    several = cos.shape[0] > 1
    strides = (t.stride(dim) if dim or several else 0 for t in (cos, sin) for dim in (0, 1))
    return (cos.data_ptr() & -16, sin.data_ptr() & -16, *strides, rotation.start, cos.shape[1])
