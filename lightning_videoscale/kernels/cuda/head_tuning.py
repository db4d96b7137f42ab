"""How the kernels of `qk_norm_rope` are launched: threads, stages of the ring, blocks per multiprocessor.

A thread holds its channels of a row in registers, so that wide blocks leave few blocks and narrow ones few registers; a
block of one warp needs no block-wide barrier at all. `MEASURED` holds what ``benchmarks/kernels/sweep_qk.py`` found
best; elsewhere `tuning_for` goes by the rules that this suggests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_videoscale.kernels.cuda.row_variant import Direction


class HeadTuning(NamedTuple):
    """One way to launch.

    Attributes:
        threads: Per block, a multiple of 32.
        stages: Of the ring in shared memory, at least 2.
        blocks: Resident per multiprocessor.
    """

    threads: int
    stages: int
    blocks: int

    def constants(self) -> dict[str, str | int]:
        """Returns the macros of ``csrc/qk_config.cuh``."""
        return {
            "BLOCK_THREADS": self.threads,
            "PIPELINE_STAGES": self.stages,
            "RESIDENT_BLOCKS": self.blocks,
        }


# (direction, q and k together, vectors in a row, tables of every head): best on an H200 for the norm over all heads.
MEASURED: dict[tuple[Direction, bool, int, bool], HeadTuning] = {
    ("forward", True, 640, False): HeadTuning(320, 3, 1),
    ("backward", False, 640, False): HeadTuning(160, 3, 2),
    ("forward", True, 384, False): HeadTuning(128, 4, 3),
    ("backward", False, 384, False): HeadTuning(96, 3, 3),
    ("forward", True, 256, True): HeadTuning(256, 2, 3),
    ("backward", False, 256, True): HeadTuning(256, 4, 2),
    ("forward", True, 192, False): HeadTuning(64, 4, 6),
    ("backward", False, 192, False): HeadTuning(64, 6, 4),
}


def tuning_for(
    direction: Direction, together: bool, vectors: int, table_heads: bool, stage_bytes: int, shared_limit: int
) -> HeadTuning | None:
    """How to launch a variant.

    Args:
        direction: Forward or backward.
        together: Whether a block takes a token's q and k at once.
        vectors: 16-byte vectors in the wider side's row.
        table_heads: Whether every head has tables of its own.
        stage_bytes: Of one row of every input, and its tables.
        shared_limit: Bytes of shared memory that one block may have.

    Returns:
        None where not even two stages fit in shared memory.
    """
    measured = MEASURED.get((direction, together, vectors, table_heads))
    if measured is not None and measured.stages * stage_bytes <= shared_limit:
        return measured
    wanted = 256 if together else 448  # threads per multiprocessor
    most = 6 if direction == "forward" else 4
    whole = [own for own in range(1, most + 1) if vectors % (32 * own) == 0]
    threads = vectors // max(whole) if whole else 32 * math.ceil(vectors / most / 32)
    threads = min(threads, 1024)
    blocks = max(1, min(16, wanted // threads))
    room = min(192 * 1024, shared_limit)
    stages = min(6, (room // blocks - 1024) // stage_bytes)
    if stages < 2:  # such as with tables of every head: fewer blocks, of more threads
        blocks = max(1, room // (3 * stage_bytes + 1024))
        enough = [own for own in whole if vectors // own * blocks >= wanted] or whole[:1]
        threads = min(vectors // max(enough) if enough else threads, 1024)
        stages = min(3, (shared_limit if blocks == 1 else room // blocks - 1024) // stage_bytes)
    return HeadTuning(threads, stages, blocks) if stages >= 2 else None
