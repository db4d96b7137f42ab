"""The sums of a backward: in which order the programs walk the rows, and where they leave what they have added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightning_videoscale.kernels.row_types import RowMap
from lightning_videoscale.kernels.triton.finalize import finalize_kernel
from lightning_videoscale.kernels.triton.launch import Launch, run_kernel

_COLUMNS, _LINES, _MOST_KINDS = 64, 32, 6


class Walk(NamedTuple):
    """An order of the rows in which those of a group lie together.

    Attributes:
        order: (E,) entries of the row map in that order; None where they lie so already.
        offsets: (G + 1,) int64, the place in that order where each group begins; None where there is an entry for each.
        groups: G, or 1 where sums run over all rows.
        all_rows: Whether sums run over all rows.
        rows_per_group: Of the row map.
        launch: The programs that walk.
    """

    order: Tensor | None
    offsets: Tensor | None
    groups: int
    all_rows: bool
    rows_per_group: int
    launch: Launch

    @classmethod
    def over(cls, rows: RowMap, launch: Launch, *, all_rows: bool) -> Walk:
        """Returns the walk over rows of this map."""
        groups = 1 if all_rows else rows.groups
        if rows.index is None:
            return cls(None, None, groups, all_rows, rows.rows_per_group, launch)
        entries, order = rows.index.sort(stable=True)
        bounds = torch.arange(groups + 1, dtype=entries.dtype, device=entries.device)
        return cls(order, torch.searchsorted(entries, bounds), groups, all_rows, rows.rows_per_group, launch)


class Partials:
    """Slots (kinds, programs + G - 1, D), float32: program p leaves its sum of group g in slot p + g.

    Args:
        kinds: Names of the sums.
        walk: Who adds what.
        like: (N, D), whose device and D to take.
    """

    def __init__(self, kinds: Sequence[str], walk: Walk, like: Tensor) -> None:
        self.kinds, self.walk = kinds, walk
        slots = walk.launch.programs + walk.groups - 1
        self.slots = like.new_empty(len(kinds), slots, like.shape[1], dtype=torch.float32)

    def slots_of(self, kinds: Sequence[str]) -> list[Tensor | None]:
        """The slots of each of ``kinds``, None for those not kept."""
        kept = dict(zip(self.kinds, self.slots, strict=True))
        return [kept.get(kind) for kind in kinds]

    def finalize(self) -> dict[str, Tensor]:
        """Adds the slots of each group in their order; (G, D) for each kind."""
        if not self.kinds:
            return {}
        walk, (_, slots, d) = self.walk, self.slots.shape
        sums = [self.slots.new_empty(walk.groups, d) for _ in self.kinds]
        run_kernel(
            finalize_kernel, (walk.groups, triton.cdiv(d, _COLUMNS), len(sums)),
            self.slots, *sums, *[None] * (_MOST_KINDS - len(sums)), walk.offsets, slots, walk.launch.rows_per_program,
            walk.rows_per_group, walk.launch.programs, D=d, COLUMNS=_COLUMNS, LINES=_LINES, ALL_ROWS=walk.all_rows,
        )  # fmt: skip
        return dict(zip(self.kinds, sums, strict=True))
