"""How a row kernel is launched: threads, stages of its ring, rows per stage, blocks per multiprocessor.

Enough bytes must be on their way to hide the memory's latency (about 40 KB per multiprocessor of an H200), a block must
not run out of registers (a thread holds modulation and sums of its columns), and a barrier should serve enough work.
`MEASURED` holds what ``benchmarks/kernels/sweep_rows.py`` found best; elsewhere `tuning_for` applies the rules above.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_videoscale.kernels.cuda.row_variant import Direction, bytes_per_row, vectors
from lightning_videoscale.kernels.row_types import RowVariant


class RowTuning(NamedTuple):
    """One way to launch.

    Attributes:
        threads: Per block, a multiple of 32.
        stages: Of the ring in shared memory.
        rows: Per stage, reduced together.
        blocks: Resident per multiprocessor.
        bulk: Bulk copies (compute capability 9.0 and newer) rather than copies per thread.
        in_turns: Blocks take a stage's rows in turns, where groups are large, rather than a share of all rows each.
        cluster: Blocks that add up their sums over rows before they leave them in memory (compute capability 9.0 and
            newer, one group); a power of two, at most 8.
    """

    threads: int
    stages: int
    rows: int
    blocks: int
    bulk: bool
    in_turns: bool = True
    cluster: int = 1

    def constants(self) -> dict[str, str | int]:
        """Returns the macros of ``csrc/row_config.cuh``."""
        return {
            "BLOCK_THREADS": self.threads,
            "PIPELINE_STAGES": self.stages,
            "STAGE_ROWS": self.rows,
            "RESIDENT_BLOCKS": self.blocks,
            "BULK_COPIES": int(self.bulk),
        }

    def shared_bytes(self, variant: RowVariant, direction: Direction) -> int:
        """Size of the ring."""
        return self.stages * self.rows * bytes_per_row(variant, direction)


# (direction, with a norm, with a residual, D, bytes per activation): best on an H200 for operands per sample. Where a
# gradient from elsewhere is added, backward moves what it does with a residual.
MEASURED: dict[tuple[Direction, bool, bool, int, int], RowTuning] = {
    ("forward", True, False, 5120, 2): RowTuning(128, 6, 1, 3, True, True),
    ("forward", True, False, 3072, 2): RowTuning(128, 6, 1, 2, False, True),
    ("forward", True, False, 2048, 2): RowTuning(128, 4, 2, 2, False, True),
    ("forward", True, False, 1536, 2): RowTuning(32, 6, 1, 8, True, True),
    ("backward", True, False, 5120, 2): RowTuning(128, 2, 2, 2, False, True, 2),
    ("backward", True, False, 3072, 2): RowTuning(128, 3, 2, 3, False, True, 4),
    ("backward", True, False, 2048, 2): RowTuning(128, 4, 2, 3, True, True),
    ("backward", True, False, 1536, 2): RowTuning(64, 2, 2, 6, False, True, 8),
    ("forward", True, True, 5120, 2): RowTuning(128, 3, 1, 2, True, True),
    ("forward", True, True, 3072, 2): RowTuning(384, 3, 2, 1, True, True),
    ("forward", True, True, 2048, 2): RowTuning(64, 4, 1, 4, True, True),
    ("forward", True, True, 1536, 2): RowTuning(96, 3, 2, 4, True, True),
    ("backward", True, True, 5120, 2): RowTuning(320, 2, 2, 1, False, True),
    ("backward", True, True, 3072, 2): RowTuning(192, 3, 1, 2, True, True),
    ("backward", True, True, 2048, 2): RowTuning(128, 3, 1, 3, False, True, 2),
    ("backward", True, True, 1536, 2): RowTuning(96, 4, 1, 4, False, True),
    ("forward", False, True, 5120, 2): RowTuning(320, 2, 1, 2, False, True),
    ("forward", False, True, 3072, 2): RowTuning(96, 2, 1, 4, False, True),
    ("forward", False, True, 2048, 2): RowTuning(64, 4, 1, 6, True, True),
    ("forward", False, True, 1536, 2): RowTuning(32, 4, 1, 8, False, True),
    ("backward", False, True, 5120, 2): RowTuning(320, 2, 2, 1, False, True),
    ("backward", False, True, 3072, 2): RowTuning(384, 6, 2, 1, False, True),
    ("backward", False, True, 2048, 2): RowTuning(128, 4, 2, 3, False, True),
    ("backward", False, True, 1536, 2): RowTuning(192, 6, 2, 2, False, True),
}


def tuning_for(
    variant: RowVariant, direction: Direction, capability: tuple[int, int], shared_limit: int
) -> RowTuning | None:
    """How to launch a variant.

    Args:
        variant: The variant.
        direction: Forward or backward.
        capability: Of the device, such as (9, 0).
        shared_limit: Bytes of shared memory that one block may have.

    Returns:
        None where not even two stages of one row fit in shared memory.
    """
    bulk = capability >= (9, 0)
    op = variant.op
    adds = op.residual or variant.has_dh
    key = (direction, op.norm is not None, adds, variant.channels, variant.activation.itemsize)
    if bulk and not variant.per_row and key in MEASURED:
        measured = MEASURED[key]
        if measured.shared_bytes(variant, direction) <= shared_limit:
            return measured
    own = math.ceil(vectors(variant) / 384)
    threads = 32 * math.ceil(vectors(variant) / own / 32)
    heavy = direction == "backward" or op.residual or variant.per_row
    blocks = max(1, (448 if heavy else 768) // threads)
    row_bytes = bytes_per_row(variant, direction)
    # What the resident blocks share, less 2 KiB that each has of its own; not so much that the L1 cache vanishes.
    budget = min(160 * 1024, shared_limit) // blocks - 2048
    stages = min(8, budget // row_bytes)
    if stages < 2:
        blocks, stages = 1, min(2, shared_limit // row_bytes)
    return RowTuning(threads, stages, 1, blocks, bulk) if stages >= 2 else None
