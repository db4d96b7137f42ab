"""Adds the slots that the programs of a backward left behind, in a fixed order: the same bits every time."""

# mypy: ignore-errors
# The bodies are Triton's language, which is not typed as Python is.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finalize_kernel(
    PARTIALS, SUM_0, SUM_1, SUM_2, SUM_3, SUM_4, SUM_5, OFFSETS, slots, rows_per_program, rows_per_group, programs,
    D: tl.constexpr, COLUMNS: tl.constexpr, LINES: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """Program (g, tile, kind) writes ``SUM_kind[g]`` of (G, D) from ``PARTIALS[kind]`` of (kinds, slots, D).

    The rows of a group lie together in the walk; OFFSETS (G + 1,) says from which entry on, None: one entry per group.
    Program p leaves group g in slot p + g. ALL_ROWS: there is one group, in slots 0, 1, ….
    """
    group = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lines = tl.arange(0, LINES)
    first, stop = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + programs
    if not ALL_ROWS:
        begin, end = group, group + 1
        if OFFSETS is not None:
            begin, end = tl.load(OFFSETS + group), tl.load(OFFSETS + group + 1)
        first = begin * rows_per_group // rows_per_program + group
        last = (end * rows_per_group - 1) // rows_per_program + group
        stop = tl.where(end > begin, last + 1, first)  # a group that nobody is in has no slots
    total = tl.zeros((LINES, COLUMNS), tl.float32)
    for slot in range(first, stop, LINES):
        inside = (slot + lines < stop)[:, None] & (columns < D)[None, :]
        total += tl.load(PARTIALS + (kind * slots + slot + lines[:, None]) * D + columns[None, :], inside, 0.0)
    total = tl.sum(total, 0)
    place, there = group * D + columns, columns < D
    if SUM_0 is not None:
        tl.store(SUM_0 + place, total, there & (kind == 0))
    if SUM_1 is not None:
        tl.store(SUM_1 + place, total, there & (kind == 1))
    if SUM_2 is not None:
        tl.store(SUM_2 + place, total, there & (kind == 2))
    if SUM_3 is not None:
        tl.store(SUM_3 + place, total, there & (kind == 3))
    if SUM_4 is not None:
        tl.store(SUM_4 + place, total, there & (kind == 4))
    if SUM_5 is not None:
        tl.store(SUM_5 + place, total, there & (kind == 5))
