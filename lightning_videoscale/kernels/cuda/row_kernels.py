"""How one direction of a row operation's variant runs on a device: its kernels, compiled, and the shape of a launch."""

from __future__ import annotations

import torch

from lightning_videoscale.kernels.cuda.launch import Kernel, load
from lightning_videoscale.kernels.cuda.row_tuning import RowTuning, tuning_for
from lightning_videoscale.kernels.cuda.row_variant import Direction, bytes_per_row, constants, sum_count, sums_operands
from lightning_videoscale.kernels.row_types import RowMap, RowVariant

# Layouts of the kernels' arguments. A source is an address and a stride in bytes; an operand values, table and a stride
# in elements; an order two addresses and four sizes.
_SOURCE, _OPERAND, _ORDER = "Pq", "PPq", "PPiiii"
_FORWARD_LAYOUT = f"{_SOURCE * 2}{_OPERAND * 3}PPPPPP{_ORDER}f"
_BACKWARD_LAYOUT = f"{_SOURCE * 4}{_OPERAND * 2}PPPPPPPPPP{_ORDER}f"
_FINALIZE_LAYOUT = f"P{_OPERAND * 2}PPPPPPPP{_ORDER}i"
_FINALIZE_TUNING = RowTuning(threads=32, stages=2, rows=1, blocks=1, bulk=False)  # One for all: it plays no part there.


class RowKernels:
    """One direction of a variant, compiled, and how it is launched. Make it once per variant."""

    def __init__(self, variant: RowVariant, direction: Direction, device: int, tuning: RowTuning | None = None) -> None:
        properties = torch.cuda.get_device_properties(device)
        tuning = tuning or device_tuning(variant, direction, device)
        if tuning is None:
            raise NotImplementedError(too_wide(variant, direction))
        macros = constants(variant)
        layout = _FORWARD_LAYOUT if direction == "forward" else _BACKWARD_LAYOUT
        self.kernel: Kernel = load(
            f"rows_{direction}.cuh",
            f"rows_{direction}",
            layout,
            macros | tuning.constants(),
            device,
            shared_bytes=tuning.shared_bytes(variant, direction),
        )
        self.block = (tuning.threads, 1, 1)
        self.sums = sum_count(variant) if direction == "backward" else 0
        self.sums_operands = sums_operands(variant)
        self.finalize: Kernel | None = None
        if self.sums:
            macros |= _FINALIZE_TUNING.constants()
            self.finalize = load("rows_finalize.cuh", "rows_finalize", _FINALIZE_LAYOUT, macros, device, early=True)
        self._direction, self._tuning = direction, tuning
        self._most_blocks = tuning.blocks * properties.multi_processor_count
        self._cluster = self._fitting_cluster(variant)

    def _fitting_cluster(self, variant: RowVariant) -> int:
        """Blocks of a cluster; fewer than the tuning says where that would leave multiprocessors empty."""
        cluster = self._tuning.cluster if self.sums else 1
        if self.sums * variant.channels * 4 > self._tuning.shared_bytes(variant, self._direction):
            return 1  # The ring is where a block leaves its part for the others.
        while cluster > 1:
            fitting = self.kernel.most_clusters(self._tuning.threads, cluster) * cluster
            if 16 * fitting >= 15 * self._most_blocks:
                self._most_blocks = min(self._most_blocks // cluster * cluster, fitting)
                break
            cluster //= 2
        return cluster

    def shape(self, n: int, rows: RowMap) -> tuple[int, int, int]:
        """Blocks of the launch, how many rows each takes at a time (see ``csrc/row_walk.cuh``), blocks of a cluster.

        Taking turns, every block meets every group: backward would need a part for each, forward loads its modulation
        anew. There it is done only where there is one group, here where a block has several rows of each.
        """
        if n >= 2**31:
            raise NotImplementedError(f"At most 2³¹ - 1 rows; got {n}.")
        most, run = self._most_blocks, self._tuning.rows
        one_group = rows.groups == 1 or (rows.index is None and rows.rows_per_group == 1)
        few_groups = self._direction == "forward" and rows.index is None and rows.rows_per_group >= 16 * most * run
        if not (self._tuning.in_turns and (one_group or few_groups)):
            run = -(-n // most)
        blocks, cluster = min(most, -(-n // run)), self._cluster if one_group else 1
        return -(-blocks // cluster) * cluster, run, cluster


def device_tuning(variant: RowVariant, direction: Direction, device: int) -> RowTuning | None:
    """How to launch a variant on a device; None where its rows are too wide."""
    properties = torch.cuda.get_device_properties(device)
    # Beside the ring a block keeps its barriers and the scratch of its sums.
    limit: int = properties.shared_memory_per_block_optin - 4096  # type: ignore[attr-defined]
    return tuning_for(variant, direction, (properties.major, properties.minor), limit)


def too_wide(variant: RowVariant, direction: Direction) -> str:
    """Why a variant cannot run where `device_tuning` has no answer."""
    return (
        f"two rows of every input ({2 * bytes_per_row(variant, direction)} bytes in {direction}) must fit in a block's "
        "shared memory"
    )
